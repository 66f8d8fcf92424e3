/* The client of MPS in the fake libcuda. */
#include "mps_client.h"
#include "mps.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { CUDA_SUCCESS = 0, CUDA_ERROR_LAUNCH_FAILED = 719, CUDA_ERROR_MPS_CONNECTION_FAILED = 805, CUDA_ERROR_MPS_RPC_FAILURE = 806 };

static int server = -1;
static unsigned gpu_minor;
static struct limits limits;

static const char *variable(const char *name)
{
	const char *value = getenv(name);
	return value ? value : "";
}

int mps_client_connect(void)
{
	char text[MPS_MESSAGE];
	int error;
	if (server >= 0)
		return CUDA_SUCCESS;
	server = mps_connect();
	if (server < 0)
		return CUDA_SUCCESS;
	mps_send(server, -1, "client %s|%s", variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"));
	if (mps_receive(server, 0, text, sizeof text, NULL) <= 0)
		return CUDA_ERROR_MPS_CONNECTION_FAILED;
	if (sscanf(text, "error %d", &error) == 1)
		return error;
	if (sscanf(text, "ok %u %u %lf", &gpu_minor, &limits.memory_mib, &limits.percentage) != 3)
		return CUDA_ERROR_MPS_CONNECTION_FAILED;
	return CUDA_SUCCESS;
}

bool mps_client(unsigned *minor, unsigned *memory_mib, double *percentage)
{
	if (server < 0)
		return false;
	*minor = gpu_minor;
	*memory_mib = limits.memory_mib;
	*percentage = limits.percentage;
	return true;
}

int mps_client_error(void)
{
	char text[MPS_MESSAGE];
	if (server < 0)
		return CUDA_SUCCESS;
	ssize_t length = mps_receive(server, MSG_DONTWAIT, text, sizeof text, NULL);
	if (length < 0 && errno == EAGAIN)
		return CUDA_SUCCESS;
	return length > 0 && !strcmp(text, "fault") ? CUDA_ERROR_LAUNCH_FAILED : CUDA_ERROR_MPS_RPC_FAILURE;
}

void mps_client_memory(unsigned mib)
{
	if (server >= 0)
		mps_send(server, -1, "memory %u", mib);
}

void mps_client_fault(void)
{
	if (server >= 0)
		mps_send(server, -1, "fault");
}
