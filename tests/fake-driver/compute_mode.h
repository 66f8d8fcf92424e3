/* The compute modes of the GPUs, and which processes have a context on one without MPS. The kernel module of the real driver knows both. */
#ifndef FAKE_DRIVER_COMPUTE_MODE_H
#define FAKE_DRIVER_COMPUTE_MODE_H

#include <stdbool.h>

/* CUcomputemode and nvmlComputeMode_t; 1 is obsolete. */
enum { COMPUTE_DEFAULT = 0, COMPUTE_PROHIBITED = 2, COMPUTE_EXCLUSIVE_PROCESS = 3 };

/* The mode of a GPU. `library` is a library of the driver. On the host, the mode is in the file `compute-mode-INDEX` next to the library.
 * Only the libraries are mounted into a container, so the modes are also in the last bytes of libcuda. */
unsigned compute_mode(const char *library, unsigned index);

/* Sets the mode. False if this process cannot write the files, as in a container. */
bool compute_mode_set(const char *library, unsigned index, unsigned mode);

/* Makes this process a user of the GPU until it ends. With `alone`, it must be the only one. The users of all containers have a lock on
 * the same file, libcuda. */
bool gpu_use(const char *library, unsigned index, bool alone);

#endif
