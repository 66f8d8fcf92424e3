/* A fake libcuda.so.1: sufficient to check whether CUDA would start. */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

enum { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_INITIALIZED = 3, CUDA_ERROR_NO_DEVICE = 100 };
enum { MAX_MINORS = 64 };

static bool initialized;

#define PUBLIC __attribute__((visibility("default")))

/* As in nvml.c: the kernel returns ENXIO after all permission checks. */
static bool opens(const char *path)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd >= 0)
		close(fd);
	return fd >= 0 || errno == ENXIO;
}

static int count(void)
{
	int found = 0;
	char path[32];
	for (int minor = 0; minor < MAX_MINORS; minor++) {
		snprintf(path, sizeof path, "/dev/nvidia%d", minor);
		found += opens(path);
	}
	return found;
}

PUBLIC int cuInit(unsigned flags)
{
	(void)flags;
	if (!opens("/dev/nvidiactl") || !opens("/dev/nvidia-uvm") || !count())
		return CUDA_ERROR_NO_DEVICE;
	initialized = true;
	return CUDA_SUCCESS;
}

PUBLIC int cuDriverGetVersion(int *version)
{
	*version = 12020;
	return CUDA_SUCCESS;
}

PUBLIC int cuDeviceGetCount(int *out)
{
	if (!initialized)
		return CUDA_ERROR_NOT_INITIALIZED;
	*out = count();
	return CUDA_SUCCESS;
}
