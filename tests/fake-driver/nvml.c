/* A fake libnvidia-ml.so.1: the calls that this project and its fake nvidia-smi make, with the real ones' signatures,
 * return codes and conditions. Signatures and codes are those of NVIDIA's nvml.h. */
#define _GNU_SOURCE // dladdr
#include "nvml.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The oldest form, for the symbol without a version. */
struct pci_info_v1 {
	char bus_id[16];
	unsigned domain, bus, device, pci_device_id;
};

struct device devices[MAX_GPUS];
unsigned device_count;
char library_path[4096];
static char config_path[4096 + 16];

static struct config config;
/* By the place of a line `mig` in the configuration. */
static struct device mig_devices[MAX_GPUS][MAX_MIG];
static struct stat config_stat;
static unsigned init_count;
/* As the real library, this one keeps the node open: the kernel module cannot be unloaded meanwhile. */
static int control = -1;

/* Whether a node lets us in. Of a major number without a driver, ENXIO is what the kernel says *after* file mode and
 * device cgroup have been passed; with a real driver it is a success. For the misc device of WSL 2, it is ENODEV, which
 * is also the answer of a kernel module whose GPU was removed. */
static unsigned try_node(const char *path, int mode)
{
	int no_driver = strcmp(path, "/dev/dxg") ? ENXIO : ENODEV;
	int fd = open(path, mode | O_CLOEXEC);
	if (fd >= 0) {
		close(fd);
		return SUCCESS;
	}
	if (errno == no_driver)
		return SUCCESS;
	return errno == EACCES || errno == EPERM ? NO_PERMISSION : DRIVER_NOT_LOADED;
}

/* On WSL 2, the library that programs load finds the driver package of Windows through libdxcore, and loads the library there. It
 * finds libdxcore by name. */
static unsigned load_from_store(void)
{
	glob_t found;
	if (!dlopen("libdxcore.so", RTLD_NOW))
		return LIBRARY_NOT_FOUND;
	if (glob("/usr/lib/wsl/drivers/*/libnvidia-ml.so.1", 0, NULL, &found))
		return DRIVER_NOT_LOADED;
	bool loaded = dlopen(found.gl_pathv[0], RTLD_NOW) != NULL;
	globfree(&found);
	return loaded ? try_node("/dev/dxg", O_RDWR) : DRIVER_NOT_LOADED;
}

static bool gpu_opens(const struct gpu *gpu)
{
	char path[32];
	snprintf(path, sizeof path, "/dev/nvidia%u", gpu->minor);
	return try_node(path, O_RDWR) == SUCCESS;
}

static bool cap_opens(unsigned minor)
{
	char path[48];
	snprintf(path, sizeof path, "/dev/nvidia-caps/nvidia-cap%u", minor);
	/* Their mode is 0444 or 0400. */
	return !minor || try_node(path, O_RDONLY) == SUCCESS;
}

static bool mig_opens(const struct mig *mig)
{
	return cap_opens(mig->cap_gi) && cap_opens(mig->cap_ci);
}

void sleep_ms(unsigned ms)
{
	struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
	while (nanosleep(&left, &left) && errno == EINTR)
		;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
	return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
	       a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static bool stat_config(struct stat *out)
{
	return *config_path && !stat(config_path, out);
}

/* Reads the configuration again if its file changed. The number of GPUs stays that of nvmlInit: a GPU without a line is lost. */
static void config_refresh(void)
{
	static struct config fresh;
	struct stat now;
	if (!stat_config(&now) || same_file(&now, &config_stat))
		return;
	/* A file that is being written is read again when it is complete. */
	if (!config_read(library_path, &fresh))
		return;
	config_stat = now;
	for (unsigned i = fresh.gpu_count; i < config.gpu_count; i++) {
		fresh.gpu[i] = config.gpu[i];
		fresh.gpu[i].fail = fresh.gpu[i].fail_handle = GPU_IS_LOST;
	}
	if (fresh.gpu_count < config.gpu_count)
		fresh.gpu_count = config.gpu_count;
	config = fresh;
}

PUBLIC unsigned nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	Dl_info self;
	/* Like the real library, it counts, and is initialized once. */
	if (init_count) {
		init_count++;
		return SUCCESS;
	}
	if (!dladdr((void *)nvmlInitWithFlags, &self))
		return UNKNOWN;
	snprintf(library_path, sizeof library_path, "%s", self.dli_fname);
	memset(&config_stat, 0, sizeof config_stat);
	/* Each call compares the file, and the links that lead to the library would cost more than the rest of the call. */
	if (!config_beside(library_path, "nvml.conf", config_path, sizeof config_path))
		*config_path = 0;
	stat_config(&config_stat);
	if (!config_read(library_path, &config))
		return UNKNOWN;
	while (config.init_hang)
		sleep_ms(1000);
	if (config.init_crash)
		abort();
	sleep_ms(config.init_delay_ms);
	if (config.init_error)
		return config.init_error;
	const char *node = config.wsl ? "/dev/dxg" : "/dev/nvidiactl";
	unsigned error = config.wsl ? load_from_store() : try_node(node, O_RDWR);
	if (error)
		return error;
	if (control < 0)
		control = open(node, O_RDWR | O_CLOEXEC);
	device_count = 0;
	for (unsigned i = 0; i < config.gpu_count; i++) {
		/* Like the real library, it lists and counts only the GPUs that it can open. */
		if (!config.wsl && !config.count_all && !gpu_opens(&config.gpu[i]))
			continue;
		devices[device_count] = (struct device){.gpu = &config.gpu[i], .index = device_count};
		device_count++;
	}
	init_count = 1;
	return SUCCESS;
}

PUBLIC unsigned nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

PUBLIC unsigned nvmlShutdown(void)
{
	if (!init_count)
		return UNINITIALIZED;
	if (--init_count)
		return SUCCESS;
	if (control >= 0)
		close(control);
	control = -1;
	return SUCCESS;
}

PUBLIC const char *nvmlErrorString(unsigned code)
{
	switch (code) {
	case SUCCESS: return "The operation was successful";
	case UNINITIALIZED: return "Uninitialized";
	case INVALID_ARGUMENT: return "Invalid Argument";
	case NOT_SUPPORTED: return "Not Supported";
	case NO_PERMISSION: return "Insufficient Permissions";
	case NOT_FOUND: return "Not Found";
	case INSUFFICIENT_SIZE: return "Insufficient Size";
	case DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
	case TIMEOUT: return "Timeout";
	case GPU_IS_LOST: return "GPU is lost";
	case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
	default: return "Unknown Error";
	}
}

static unsigned put_text(const char *text, char *out, unsigned size)
{
	if (!out)
		return INVALID_ARGUMENT;
	if (strlen(text) >= size)
		return INSUFFICIENT_SIZE;
	strcpy(out, text);
	return SUCCESS;
}

void misbehave(const char *call, const struct gpu *gpu)
{
	if (!strcmp(gpu->crash, call))
		abort();
	while (!strcmp(gpu->hang, call)) {
		sleep_ms(100);
		config_refresh();
	}
}

unsigned check(const char *call)
{
	if (!init_count)
		return UNINITIALIZED;
	config_refresh();
	for (unsigned i = 0; i < config.not_supported_count; i++)
		if (!strcmp(config.not_supported[i], call))
			return NOT_SUPPORTED;
	/* A caller that finds no symbol gets this code from its own wrapper, too. */
	for (unsigned i = 0; i < config.missing_count; i++)
		if (!strcmp(config.missing[i], call))
			return FUNCTION_NOT_FOUND;
	return SUCCESS;
}

const struct process *processes(unsigned *count)
{
	*count = config.process_count;
	return config.process;
}

unsigned check_device(const char *call, const struct device *device)
{
	unsigned code = check(call);
	if (code)
		return code;
	if (!device || !device->gpu)
		return INVALID_ARGUMENT;
	misbehave(call, device->gpu);
	return device->gpu->fail;
}

PUBLIC unsigned nvmlSystemGetDriverVersion(char *out, unsigned size)
{
	CHECK();
	return put_text(config.driver, out, size);
}

PUBLIC unsigned nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
	CHECK();
	char text[96];
	snprintf(text, sizeof text, "12.%s", config.driver);
	return put_text(text, out, size);
}

PUBLIC unsigned nvmlSystemGetCudaDriverVersion(int *out)
{
	CHECK();
	*out = config.cuda;
	return SUCCESS;
}

PUBLIC unsigned nvmlSystemGetCudaDriverVersion_v2(int *out)
{
	return nvmlSystemGetCudaDriverVersion(out);
}

PUBLIC unsigned nvmlDeviceGetCount_v2(unsigned *out)
{
	CHECK();
	*out = device_count;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out)
{
	CHECK();
	if (index >= device_count)
		return INVALID_ARGUMENT;
	misbehave(__func__, devices[index].gpu);
	if (devices[index].gpu->fail_handle)
		return devices[index].gpu->fail_handle;
	*out = &devices[index];
	return SUCCESS;
}

static struct device *mig_handle(unsigned gpu, unsigned place)
{
	const struct device *parent = &devices[gpu];
	struct device *device = &mig_devices[gpu][place];
	*device = (struct device){.gpu = parent->gpu, .mig = &parent->gpu->mig[place], .index = place};
	return device;
}

PUBLIC unsigned nvmlDeviceGetHandleByUUID(const char *uuid, struct device **out)
{
	CHECK();
	for (unsigned i = 0; i < device_count; i++) {
		const struct gpu *gpu = devices[i].gpu;
		if (!strcmp(gpu->uuid, uuid))
			return nvmlDeviceGetHandleByIndex_v2(i, out);
		for (unsigned m = 0; m < gpu->mig_count; m++) {
			if (strcmp(gpu->mig[m].uuid, uuid) || !mig_opens(&gpu->mig[m]))
				continue;
			*out = mig_handle(i, m);
			return gpu->fail;
		}
	}
	return NOT_FOUND;
}

PUBLIC unsigned nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct device **out)
{
	CHECK();
	unsigned domain, bus, slot;
	if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3)
		return INVALID_ARGUMENT;
	for (unsigned i = 0; i < device_count; i++) {
		const struct gpu *gpu = devices[i].gpu;
		if (gpu->domain == domain && gpu->bus == bus && gpu->device == slot)
			return nvmlDeviceGetHandleByIndex_v2(i, out);
	}
	return NOT_FOUND;
}

PUBLIC unsigned nvmlDeviceGetName(struct device *device, char *out, unsigned size)
{
	CHECK_DEVICE(device);
	char text[160];
	snprintf(text, sizeof text, "%s", device->gpu->name);
	if (device->mig && *device->mig->profile)
		snprintf(text, sizeof text, "%s MIG %s", device->gpu->name, device->mig->profile);
	return put_text(text, out, size);
}

PUBLIC unsigned nvmlDeviceGetUUID(struct device *device, char *out, unsigned size)
{
	CHECK_DEVICE(device);
	return put_text(device->mig ? device->mig->uuid : device->gpu->uuid, out, size);
}

PUBLIC unsigned nvmlDeviceGetPciInfo(struct device *device, struct pci_info_v1 *out)
{
	CHECK_DEVICE(device);
	const struct gpu *gpu = device->gpu;
	memset(out, 0, sizeof *out);
	snprintf(out->bus_id, sizeof out->bus_id, "%04X:%02X:%02X.0", gpu->domain & 0xffff, gpu->bus & 0xff, gpu->device & 0xff);
	out->domain = gpu->domain;
	out->bus = gpu->bus;
	out->device = gpu->device;
	out->pci_device_id = 0x233010de;
	return SUCCESS;
}

void fill_pci_info(const struct gpu *gpu, struct pci_info *out)
{
	memset(out, 0, sizeof *out);
	snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0", gpu->domain & 0xffff, gpu->bus & 0xff,
		 gpu->device & 0xff);
	snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", gpu->domain, gpu->bus & 0xff, gpu->device & 0xff);
	out->domain = gpu->domain;
	out->bus = gpu->bus;
	out->device = gpu->device;
	out->pci_device_id = 0x233010de;
}

PUBLIC unsigned nvmlDeviceGetPciInfo_v3(struct device *device, struct pci_info *out)
{
	CHECK_DEVICE(device);
	fill_pci_info(device->gpu, out);
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor)
{
	CHECK_DEVICE(device);
	*major = device->gpu->cc_major;
	*minor = device->gpu->cc_minor;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetBrand(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	*out = device->gpu->brand;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetMinorNumber(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	/* On WSL 2, GPUs have no nodes. */
	if (config.wsl)
		return NOT_SUPPORTED;
	*out = device->gpu->minor;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetIndex(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	*out = device->index;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetPersistenceMode(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	*out = 0;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending)
{
	CHECK_DEVICE(device);
	*current = *pending = device->gpu->mig_enabled;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	*out = device->gpu->mig_enabled ? MAX_MIG : 0;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index, struct device **out)
{
	CHECK_DEVICE(device);
	/* In a container, it lists those whose two capability nodes can be opened. */
	for (unsigned m = 0; m < device->gpu->mig_count; m++) {
		if (!mig_opens(&device->gpu->mig[m]) || index--)
			continue;
		*out = mig_handle(device->index, m);
		return SUCCESS;
	}
	return NOT_FOUND;
}

PUBLIC unsigned nvmlDeviceGetGpuInstanceId(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	if (!device->mig)
		return INVALID_ARGUMENT;
	*out = device->mig->gi;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetComputeInstanceId(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	if (!device->mig)
		return INVALID_ARGUMENT;
	*out = device->mig->ci;
	return SUCCESS;
}
