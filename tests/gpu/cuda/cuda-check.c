/* Runs a kernel through CUDA's driver API, with libcuda.so.1 only: no toolkit, no other library.
 *
 * Usage: cuda-check vector-add KERNELS    adds two vectors on the first GPU, and prints "Test PASSED" if the sums are right
 *        cuda-check hold KERNELS          allocates memory on the first GPU, prints "holding", and keeps it for ten seconds
 *        cuda-check fault KERNELS         writes to an invalid address. Succeeds if the driver reports the error.
 *        cuda-check memory MIB SECONDS    prints what the program may use of the first GPU, allocates memory there, and writes to it for
 *                                         this time
 *
 * KERNELS is kernels.ptx. The functions, types and numbers are those of NVIDIA's cuda.h. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, ERROR_ILLEGAL_ADDRESS = 700, ERROR_LAUNCH_FAILED = 719 };
enum { COUNT = 50000, THREADS = 256 };

typedef unsigned long long address;

static void *driver;

static void *function(const char *name)
{
	void *found = dlsym(driver, name);
	if (!found) {
		printf("libcuda.so.1 lacks %s\n", name);
		exit(1);
	}
	return found;
}

#define CALL(name, types, ...) ((int(*) types)function(#name))(__VA_ARGS__)
/* Ends the program with the name of the error. */
#define DO(name, types, ...) done(#name, CALL(name, types, __VA_ARGS__))

static const char *name_of(int error)
{
	const char *name = NULL;
	if (CALL(cuGetErrorName, (int, const char **), error, &name) || !name)
		return "unknown error";
	return name;
}

static void done(const char *call, int error)
{
	if (!error)
		return;
	printf("%s: %d, %s\n", call, error, name_of(error));
	exit(1);
}

static char *read_file(const char *path)
{
	FILE *file = fopen(path, "r");
	char *text = calloc(1, 64 * 1024);
	if (!file || !text || !fread(text, 1, 64 * 1024 - 1, file)) {
		printf("cannot read %s\n", path);
		exit(1);
	}
	fclose(file);
	return text;
}

static void *kernel(const char *path, const char *name)
{
	void *module = NULL, *found = NULL;
	char *text = read_file(path);
	DO(cuModuleLoadData, (void **, const void *), &module, text);
	free(text);
	DO(cuModuleGetFunction, (void **, void *, const char *), &found, module, name);
	return found;
}

#define LAUNCH(kernel, blocks, threads, parameters)                                                                      \
	CALL(cuLaunchKernel,                                                                                             \
	     (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **),   \
	     kernel, blocks, 1, 1, threads, 1, 1, 0, NULL, parameters, NULL)

static address to_device(const float *values, size_t size)
{
	address memory = 0;
	DO(cuMemAlloc_v2, (address *, size_t), &memory, size);
	DO(cuMemcpyHtoD_v2, (address, const void *, size_t), memory, values, size);
	return memory;
}

static int vector_add(const char *path)
{
	static float a[COUNT], b[COUNT], sum[COUNT];
	unsigned count = COUNT;
	for (unsigned i = 0; i < COUNT; i++) {
		a[i] = (float)i * 0.5f;
		b[i] = (float)(COUNT - i);
		sum[i] = -1;
	}
	void *add = kernel(path, "vector_add");
	address at[3] = {to_device(a, sizeof a), to_device(b, sizeof b), to_device(sum, sizeof sum)};
	void *parameters[] = {&at[0], &at[1], &at[2], &count};
	done("cuLaunchKernel", LAUNCH(add, (COUNT + THREADS - 1) / THREADS, THREADS, parameters));
	DO(cuCtxSynchronize, (void), );
	DO(cuMemcpyDtoH_v2, (void *, address, size_t), sum, at[2], sizeof sum);
	for (unsigned i = 0; i < 3; i++)
		DO(cuMemFree_v2, (address), at[i]);
	for (unsigned i = 0; i < COUNT; i++) {
		if (sum[i] != a[i] + b[i]) {
			printf("element %u is %f instead of %f\nTest FAILED\n", i, (double)sum[i], (double)(a[i] + b[i]));
			return 1;
		}
	}
	puts("Test PASSED");
	return 0;
}

static int hold(void)
{
	address memory = 0;
	DO(cuMemAlloc_v2, (address *, size_t), &memory, 64 << 20);
	puts("holding");
	fflush(stdout);
	sleep(10);
	return 0;
}

enum { ATTRIBUTE_MULTIPROCESSOR_COUNT = 16, ATTRIBUTE_COMPUTE_MODE = 20 };

static int use_memory(int device, size_t mib, double seconds)
{
	int multiprocessors = 0, mode = 0;
	size_t left = 0, total = 0;
	address memory = 0;
	DO(cuDeviceGetAttribute, (int *, int, int), &multiprocessors, ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
	DO(cuDeviceGetAttribute, (int *, int, int), &mode, ATTRIBUTE_COMPUTE_MODE, device);
	DO(cuMemGetInfo_v2, (size_t *, size_t *), &left, &total);
	printf("multiprocessors %d, compute mode %d, free %zu MiB\n", multiprocessors, mode, left >> 20);
	DO(cuMemAlloc_v2, (address *, size_t), &memory, mib << 20);
	printf("allocated %zu MiB\n", mib);
	fflush(stdout);
	do {
		DO(cuMemsetD8_v2, (address, unsigned char, size_t), memory, 1, 4096);
		DO(cuCtxSynchronize, (void), );
		usleep(100000);
		seconds -= 0.1;
	} while (seconds > 0);
	DO(cuMemFree_v2, (address), memory);
	puts("done");
	return 0;
}

static int fault(const char *path)
{
	/* Not aligned to a page that any allocation begins with, and aligned for the store. */
	address nowhere = 0x10;
	void *store = kernel(path, "store_to_nowhere");
	void *parameters[] = {&nowhere};
	int error = LAUNCH(store, 1, 1, parameters);
	if (!error)
		error = CALL(cuCtxSynchronize, (void), );
	printf("the driver reports %d, %s\n", error, name_of(error));
	return error == ERROR_ILLEGAL_ADDRESS || error == ERROR_LAUNCH_FAILED ? 0 : 1;
}

int main(int argc, char **argv)
{
	bool memory = argc == 4 && !strcmp(argv[1], "memory");
	if (!memory && (argc != 3 || (strcmp(argv[1], "vector-add") && strcmp(argv[1], "hold") && strcmp(argv[1], "fault")))) {
		puts("usage: cuda-check vector-add|hold|fault KERNELS\n       cuda-check memory MIB SECONDS");
		return 2;
	}
	driver = dlopen("libcuda.so.1", RTLD_NOW);
	if (!driver) {
		puts(dlerror());
		return 1;
	}
	int device = 0, count = 0, version = 0;
	char name[128] = "";
	void *context = NULL;
	DO(cuInit, (unsigned), 0);
	DO(cuDriverGetVersion, (int *), &version);
	DO(cuDeviceGetCount, (int *), &count);
	DO(cuDeviceGet, (int *, int), &device, 0);
	DO(cuDeviceGetName, (char *, int, int), name, sizeof name, device);
	printf("CUDA %d.%d, %d devices, the first is %s\n", version / 1000, version % 1000 / 10, count, name);
	/* The context of the device needs no version of cuCtxCreate, of which there are four. */
	DO(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
	DO(cuCtxSetCurrent, (void *), context);
	fflush(stdout);
	if (memory)
		return use_memory(device, strtoul(argv[2], NULL, 10), atof(argv[3]));
	if (!strcmp(argv[1], "hold"))
		return hold();
	return strcmp(argv[1], "fault") ? vector_add(argv[2]) : fault(argv[2]);
}
