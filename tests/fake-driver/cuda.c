/* A fake libcuda.so.1: what a program needs to run the kernels of tests/gpu/cuda, with the interface of the real one. Memory of the
 * device is memory of the process, and the fake executes a kernel itself, by its name. Functions, types and numbers are those of
 * NVIDIA's cuda.h. */
#define _GNU_SOURCE // dladdr
#include "compute_mode.h"
#include "config.h"
#include "mps_client.h"

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
	CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_INVALID_PTX = 218,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_ILLEGAL_ADDRESS = 700,
	CUDA_ERROR_LAUNCH_FAILED = 719,
	CUDA_ERROR_MPS_CONNECTION_FAILED = 805,
	CUDA_ERROR_MPS_RPC_FAILURE = 806,
	CUDA_ERROR_MPS_SERVER_NOT_READY = 807,
	CUDA_ERROR_MPS_MAX_CLIENTS_REACHED = 808,
};
enum { MAX_MINORS = 64, XID_MMU_FAULT = 31, MAX_ALLOCATIONS = 64 };
/* Of an H100, and what the context of a program takes of its memory. */
enum { MULTIPROCESSORS = 132, MEMORY_MIB = 81559, CONTEXT_MIB = 526, MPS_CONTEXT_MIB = 218 };

enum kernel { NONE, VECTOR_ADD, STORE_TO_NOWHERE };

typedef unsigned long long address;

static bool initialized;
static int current = -1; /* the device of the current context */
static int sticky;       /* after a fault, each call returns its error */
static bool module_loaded;
static struct {
	void *memory;
	size_t size;
} allocations[MAX_ALLOCATIONS];
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

/* The limits of a client of MPS, or what a program has without it. */
struct limits {
	unsigned minor, memory_mib;
	double percentage;
};

static bool has_mps(struct limits *out)
{
	*out = (struct limits){.percentage = 100};
	return mps_client(&out->minor, &out->memory_mib, &out->percentage);
}

/* The file of this library. */
static const char *library(void)
{
	static Dl_info self;
	return self.dli_fname || dladdr((void *)library, &self) ? self.dli_fname : "";
}

/* The minor number of the GPU whose UUID is in CUDA_VISIBLE_DEVICES; -1 without a UUID. It is not known in a container, which has only
 * the GPUs that it may use. */
static int visible_minor(void)
{
	static struct config config;
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");
	if (!visible || strncmp(visible, "GPU-", 4) || !config_read(library(), &config))
		return -1;
	for (unsigned i = 0; i < config.gpu_count; i++)
		if (!strcmp(config.gpu[i].uuid, visible))
			return (int)config.gpu[i].minor;
	return -1;
}

/* The minor number of a device, or -1. A client of MPS has the GPU of its server only. */
static int minor_of(int device)
{
	char path[32];
	struct limits limits;
	int only = has_mps(&limits) ? (int)limits.minor : visible_minor();
	for (int minor = 0; minor < MAX_MINORS; minor++) {
		if (only >= 0 && minor != only)
			continue;
		snprintf(path, sizeof path, "/dev/nvidia%d", minor);
		if (opens(path) && !device--)
			return minor;
	}
	return -1;
}

static int count(void)
{
	int found = 0;
	while (minor_of(found) >= 0)
		found++;
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
	int error = mps_client_connect();
	if (error)
		return error;
	if (!count())
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
		{CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
		{CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
		{CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
		{CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
		{CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
		{CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
		{CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX"},
		{CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
		{CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
		{CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
		{CUDA_ERROR_MPS_CONNECTION_FAILED, "CUDA_ERROR_MPS_CONNECTION_FAILED"},
		{CUDA_ERROR_MPS_RPC_FAILURE, "CUDA_ERROR_MPS_RPC_FAILURE"},
		{CUDA_ERROR_MPS_SERVER_NOT_READY, "CUDA_ERROR_MPS_SERVER_NOT_READY"},
		{CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"},
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

enum { ATTRIBUTE_MULTIPROCESSOR_COUNT = 16, ATTRIBUTE_COMPUTE_MODE = 20 };

PUBLIC int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	struct limits limits;
	if (!initialized)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (device < 0 || device >= count())
		return CUDA_ERROR_INVALID_DEVICE;
	has_mps(&limits);
	if (attribute == ATTRIBUTE_MULTIPROCESSOR_COUNT)
		*value = (int)(MULTIPROCESSORS * limits.percentage / 100) & ~1; /* Pairs of them are given. */
	else if (attribute == ATTRIBUTE_COMPUTE_MODE)
		*value = (int)compute_mode(library(), (unsigned)minor_of(device));
	else
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

/* nvml_processes.c lists the file; in a container, it cannot be written. */
static char process_file[PATH_MAX + 64];

static void remove_process_file(void)
{
	unlink(process_file);
}

static void list_process(int minor)
{
	char name[48];
	snprintf(name, sizeof name, "nvml.processes-%d.%d", minor, getpid());
	if (*process_file || !config_beside(library(), name, process_file, sizeof process_file))
		return;
	FILE *file = fopen(process_file, "we");
	if (!file)
		return;
	fprintf(file, "process gpu=%d pid=%d memory=%d\n", minor, getpid(), CONTEXT_MIB);
	fclose(file);
	atexit(remove_process_file);
}

/* Whether the compute mode permits a context of this process. The fake takes the minor number of a GPU as its index. */
static bool may_use(int minor)
{
	static unsigned long long used;
	struct limits limits;
	unsigned mode = compute_mode(library(), (unsigned)minor);
	if (mode == COMPUTE_PROHIBITED)
		return false;
	if (has_mps(&limits) || used & 1ull << minor)
		return true;
	if (!gpu_use(library(), (unsigned)minor, mode == COMPUTE_EXCLUSIVE_PROCESS))
		return false;
	used |= 1ull << minor;
	list_process(minor);
	return true;
}

PUBLIC int cuDevicePrimaryCtxRetain(void **context, int device)
{
	static int contexts[MAX_MINORS];
	if (!initialized)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (device < 0 || device >= count())
		return CUDA_ERROR_INVALID_DEVICE;
	if (!may_use(minor_of(device)))
		return CUDA_ERROR_DEVICE_UNAVAILABLE;
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
	if (!sticky)
		sticky = mps_client_error();
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

/* The bytes that this program can allocate at all, and those that are left. */
static void memory(unsigned long long *total, unsigned long long *left)
{
	struct limits limits;
	unsigned context = has_mps(&limits) ? MPS_CONTEXT_MIB : CONTEXT_MIB;
	unsigned mib = limits.memory_mib && limits.memory_mib < MEMORY_MIB ? limits.memory_mib : MEMORY_MIB;
	*total = *left = (unsigned long long)(mib > context ? mib - context : 0) << 20;
	for (unsigned i = 0; i < MAX_ALLOCATIONS; i++)
		*left -= allocations[i].size;
}

static void report_memory(void)
{
	unsigned long long total, left;
	memory(&total, &left);
	mps_client_memory((unsigned)((total - left) >> 20) + MPS_CONTEXT_MIB);
}

PUBLIC int cuMemGetInfo_v2(size_t *left, size_t *total)
{
	unsigned long long all, rest;
	int error = ready();
	if (error)
		return error;
	memory(&all, &rest);
	*left = rest;
	/* As the real one: the memory of the GPU, although the program cannot get it. */
	*total = (size_t)MEMORY_MIB << 20;
	return CUDA_SUCCESS;
}

PUBLIC int cuMemAlloc_v2(address *out, size_t size)
{
	unsigned long long total, left;
	unsigned place = 0;
	int error = ready();
	if (error)
		return error;
	memory(&total, &left);
	while (place < MAX_ALLOCATIONS && allocations[place].memory)
		place++;
	/* Pages that are not written take no memory of the host. */
	void *allocated = size <= left && place < MAX_ALLOCATIONS ? calloc(1, size) : NULL;
	if (!allocated)
		return CUDA_ERROR_OUT_OF_MEMORY;
	allocations[place].memory = allocated;
	allocations[place].size = size;
	report_memory();
	*out = (address)allocated;
	return CUDA_SUCCESS;
}

PUBLIC int cuMemFree_v2(address memory)
{
	for (unsigned i = 0; i < MAX_ALLOCATIONS; i++) {
		if (allocations[i].memory != (void *)memory)
			continue;
		free(allocations[i].memory);
		allocations[i].memory = NULL;
		allocations[i].size = 0;
		report_memory();
		return ready();
	}
	return CUDA_ERROR_INVALID_VALUE;
}

PUBLIC int cuMemsetD8_v2(address to, unsigned char value, size_t size)
{
	int error = ready();
	if (!error)
		memset((void *)to, value, size);
	return error;
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
	char path[PATH_MAX + 16], line[32];
	if (!config_beside(library(), "nvml.events", path, sizeof path))
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
		mps_client_fault();
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

PUBLIC int cuCtxSynchronize(void)
{
	return ready();
}
