#define STEP plain
#include "forward.h"
