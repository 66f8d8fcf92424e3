/* A fake libcuda.so.1: what a program needs to run the kernels of tests/gpu/cuda, with the interface of the real one. Memory of the
 * device is memory of the process, and the fake executes a kernel itself, by its name. Functions, types and numbers are those of
 * NVIDIA's cuda.h. */
#define _GNU_SOURCE // dladdr
#include "config.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_INVALID_PTX = 218,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_ILLEGAL_ADDRESS = 700,
};
enum { MAX_MINORS = 64, XID_MMU_FAULT = 31 };

enum kernel { NONE, VECTOR_ADD, STORE_TO_NOWHERE };

typedef unsigned long long address;

static bool initialized;
static int current = -1; /* the device of the current context */
static int sticky;       /* after a fault, each call returns its error */
static bool module_loaded;
static enum kernel functions[] = {VECTOR_ADD, STORE_TO_NOWHERE};

#define PUBLIC __attribute__((visibility("default")))

/* As in nvml.c: the kernel returns ENXIO or ENODEV after all permission checks. */
static bool opens(const char *path)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd >= 0)
		close(fd);
	return fd >= 0 || errno == ENXIO || errno == ENODEV;
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
	/* WSL 2 */
	if (opens("/dev/dxg")) {
		initialized = true;
		return CUDA_SUCCESS;
	}
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

PUBLIC int cuGetErrorName(int error, const char **name)
{
	static const struct {
		int error;
		const char *name;
	} names[] = {
		{CUDA_SUCCESS, "CUDA_SUCCESS"},
		{CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
		{CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
		{CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
		{CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
		{CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
		{CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX"},
		{CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
		{CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
	};
	*name = NULL;
	for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
		if (names[i].error == error)
			*name = names[i].name;
	return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

PUBLIC int cuDeviceGetCount(int *out)
{
	if (!initialized)
		return CUDA_ERROR_NOT_INITIALIZED;
	*out = count();
	return CUDA_SUCCESS;
}

PUBLIC int cuDeviceGet(int *device, int ordinal)
{
	if (!initialized)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (ordinal < 0 || ordinal >= count())
		return CUDA_ERROR_INVALID_DEVICE;
	*device = ordinal;
	return CUDA_SUCCESS;
}

PUBLIC int cuDeviceGetName(char *name, int length, int device)
{
	if (!initialized)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (device < 0 || device >= count())
		return CUDA_ERROR_INVALID_DEVICE;
	snprintf(name, (size_t)length, "NVIDIA H100 80GB HBM3");
	return CUDA_SUCCESS;
}

PUBLIC int cuDevicePrimaryCtxRetain(void **context, int device)
{
	static int contexts[MAX_MINORS];
	if (!initialized)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (device < 0 || device >= count())
		return CUDA_ERROR_INVALID_DEVICE;
	contexts[device] = device;
	*context = &contexts[device];
	return CUDA_SUCCESS;
}

PUBLIC int cuCtxSetCurrent(void *context)
{
	current = context ? *(int *)context : -1;
	return CUDA_SUCCESS;
}

/* What each call that needs a context returns first. */
static int ready(void)
{
	if (!initialized)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (current < 0)
		return CUDA_ERROR_INVALID_CONTEXT;
	return sticky;
}

PUBLIC int cuModuleLoadData(void **module, const void *image)
{
	int error = ready();
	if (error)
		return error;
	if (!strstr(image, "\n.version ") || !strstr(image, "\n.target sm_"))
		return CUDA_ERROR_INVALID_PTX;
	module_loaded = true;
	*module = &module_loaded;
	return CUDA_SUCCESS;
}

PUBLIC int cuModuleGetFunction(void **function, void *module, const char *name)
{
	int error = ready();
	if (error)
		return error;
	if (module != &module_loaded || !module_loaded)
		return CUDA_ERROR_INVALID_VALUE;
	if (!strcmp(name, "vector_add"))
		*function = &functions[0];
	else if (!strcmp(name, "store_to_nowhere"))
		*function = &functions[1];
	else
		return CUDA_ERROR_NOT_FOUND;
	return CUDA_SUCCESS;
}

PUBLIC int cuMemAlloc_v2(address *memory, size_t size)
{
	int error = ready();
	if (error)
		return error;
	void *allocated = calloc(1, size);
	*memory = (address)allocated;
	return allocated ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

PUBLIC int cuMemFree_v2(address memory)
{
	free((void *)memory);
	return ready();
}

PUBLIC int cuMemcpyHtoD_v2(address to, const void *from, size_t size)
{
	int error = ready();
	if (!error)
		memcpy((void *)to, from, size);
	return error;
}

PUBLIC int cuMemcpyDtoH_v2(void *to, address from, size_t size)
{
	int error = ready();
	if (!error)
		memcpy(to, (const void *)from, size);
	return error;
}

/* The driver reports the fault to all programs that wait for events of the GPU: see nvml_events.c. The test that expects one has
 * created the file, because the real driver leaves none on the host. */
static void report_fault(void)
{
	Dl_info self;
	char path[PATH_MAX + 16], line[32];
	if (!dladdr((void *)cuInit, &self) || !config_beside(self.dli_fname, "nvml.events", path, sizeof path))
		return;
	int events = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
	if (events < 0)
		return;
	int length = snprintf(line, sizeof line, "xid %d %d\n", current, XID_MMU_FAULT);
	if (write(events, line, (size_t)length) != length)
		perror("nvml.events");
	close(events);
}

PUBLIC int cuLaunchKernel(const enum kernel *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
			  unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra)
{
	(void)stream, (void)extra, (void)shared;
	int error = ready();
	if (error)
		return error;
	unsigned long long threads = 1ull * grid_x * grid_y * grid_z * block_x * block_y * block_z;
	if (!threads)
		return CUDA_ERROR_INVALID_VALUE;
	switch (*function) {
	case VECTOR_ADD: {
		const float *a = *(const float **)parameters[0], *b = *(const float **)parameters[1];
		float *sum = *(float **)parameters[2];
		unsigned elements = *(unsigned *)parameters[3];
		for (unsigned long long i = 0; i < threads && i < elements; i++)
			sum[i] = a[i] + b[i];
		return CUDA_SUCCESS;
	}
	case STORE_TO_NOWHERE:
		/* Launches are asynchronous: the next call returns the error. */
		sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
		report_fault();
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

PUBLIC int cuCtxSynchronize(void)
{
	return ready();
}
