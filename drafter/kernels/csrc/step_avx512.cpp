#define STEP avx512
#include "forward.h"
