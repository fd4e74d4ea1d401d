#include <cuda.h>

/* A property of the device, by CUDA's number for it; 0 if it has none. */
int device_attribute(int which);
