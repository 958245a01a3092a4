#define STEP avx2
#include "search.h"
