#define STEP avx_vnni
#include "search.h"
