#define STEP avx2
#include "forward.h"
