#define STEP plain
#include "search.h"
