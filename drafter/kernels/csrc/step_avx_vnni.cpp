#define STEP avx_vnni
#include "forward.h"
