/* What the parts of the fake MPS share: the control program and its daemon, the server, and the client in libcuda. Names, texts and
 * the files of the pipe directory are those of driver 580.159.04; the messages between the parts are ours.
 *
 * Each message is a packet. A client sends `client MEMORY-LIMITS|PERCENTAGE` with its variables, a user interface `ui COMMAND`. The
 * daemon passes the connection of a client to the server, which answers `ok MINOR MEMORY-MIB PERCENTAGE` or `not-ready`; the daemon
 * itself answers `refused`. Then the client sends `memory MIB` and `fault`, and the server `fault` after the fault of any client. */
#ifndef FAKE_DRIVER_MPS_H
#define FAKE_DRIVER_MPS_H

#include "config.h"

#include <stddef.h>
#include <sys/types.h>
#include <sys/un.h>

enum { MPS_MESSAGE = 4096 };
/* The files that the server inherits. */
enum { MPS_CHANNEL = 3, MPS_SERVER_LOG = 4 };

struct limits {
	unsigned memory_mib; /* 0: no limit */
	double percentage;
};

/* The directory of the sockets, and the path of a file in it. */
const char *mps_pipe_directory(void);
bool mps_pipe_path(const char *name, char *out, size_t size);

/* The address of the socket `name` in the pipe directory. False if the path is too long for a socket. */
bool mps_address(const char *name, struct sockaddr_un *out);

/* Connects to the daemon: a socket, or -1 without a daemon. */
int mps_connect(void);

/* Sends a packet, with a file descriptor unless it is -1. */
bool mps_send(int socket, int fd, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Receives a packet and a file descriptor, if `fd` is not NULL. Returns its length, 0 at the end, or -1. */
ssize_t mps_receive(int socket, int flags, char *text, size_t size, int *fd);

/* Writes a line to a log, and to stdout, which is /dev/null for a daemon in the background. */
void mps_log(int log, const char *who, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* The configuration of the driver to which this program belongs. */
const struct config *mps_config(void);

/* Writes the list of processes of a GPU for nvml_processes.c: lines `process` as in nvml.conf. */
void mps_write_processes(unsigned index, const char *text, size_t length);

/* Returns the GPU that CUDA_VISIBLE_DEVICES names: the first one without the variable, NULL if it does not exist. */
const struct gpu *mps_gpu(const struct config *config, unsigned *index);

/* The number of MiB in `2G` or `512M`; 0 if it is neither. */
unsigned mps_parse_memory(const char *text);

#endif
