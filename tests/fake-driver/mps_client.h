/* The client of MPS in the fake libcuda. */
#ifndef FAKE_DRIVER_MPS_CLIENT_H
#define FAKE_DRIVER_MPS_CLIENT_H

#include <stdbool.h>

/* Connects to the daemon of the pipe directory, and waits until there is a server. Returns an error of CUDA; without a daemon, there is
 * none, and the program runs without MPS. */
int mps_client_connect(void);

/* Whether this program is a client; the minor number of its only GPU, its memory limit (0: none), and its share of the multiprocessors. */
bool mps_client(unsigned *minor, unsigned *memory_mib, double *percentage);

/* Returns the error that the end of the server, or the fault of another client, is for this program. */
int mps_client_error(void);

void mps_client_memory(unsigned mib);
void mps_client_fault(void);

#endif
