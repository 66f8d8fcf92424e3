/* What the parts of the fake libnvidia-ml.so.1 share. Signatures and codes are those of NVIDIA's nvml.h. */
#ifndef FAKE_DRIVER_NVML_H
#define FAKE_DRIVER_NVML_H

#include "config.h"

enum {
	SUCCESS = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	NO_PERMISSION = 4,
	NOT_FOUND = 6,
	INSUFFICIENT_SIZE = 7,
	DRIVER_NOT_LOADED = 9,
	TIMEOUT = 10,
	LIBRARY_NOT_FOUND = 12,
	FUNCTION_NOT_FOUND = 13,
	GPU_IS_LOST = 15,
	LIB_RM_VERSION_MISMATCH = 18,
	ARGUMENT_VERSION_MISMATCH = 25,
	UNKNOWN = 999,
};

struct device {
	const struct gpu *gpu;
	const struct mig *mig;
	unsigned index;
};

struct pci_info {
	char bus_id_legacy[16];
	unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
	char bus_id[32];
};

/* What a MIG device has. */
struct attributes {
	unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
	unsigned long long memory_mib;
};

/* Multiprocessors of a slice. */
enum { MULTIPROCESSORS = 16 };

/* `1g.10gb`, `1c.3g.20gb`, `1g.10gb+me` */
bool parse_profile(const char *text, struct attributes *out);

#define PUBLIC __attribute__((visibility("default")))

/* The processes of the configuration. */
const struct process *processes(unsigned *count);

/* The GPUs that nvmlInit counted. */
extern struct device devices[MAX_GPUS];
extern unsigned device_count;

/* The file of this library. */
extern char library_path[4096];

void sleep_ms(unsigned ms);

/* Comes first in each call: reads the configuration again if it changed, and lets a GPU fail, hang or crash. */
unsigned check(const char *call);
unsigned check_device(const char *call, const struct device *device);

/* Hangs while the configuration demands it for this call and GPU, or crashes. */
void misbehave(const char *call, const struct gpu *gpu);

void fill_pci_info(const struct gpu *gpu, struct pci_info *out);

#define CHECK() \
	do { \
		unsigned code_ = check(__func__); \
		if (code_) \
			return code_; \
	} while (0)
#define CHECK_DEVICE(device) \
	do { \
		unsigned code_ = check_device(__func__, device); \
		if (code_) \
			return code_; \
	} while (0)

#endif
