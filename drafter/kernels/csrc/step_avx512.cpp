#define STEP avx512
#include "search.h"
