/* The fake libnvidia-ml.so.1: compute modes. */
#define _GNU_SOURCE // syscall
#include "compute_mode.h"
#include "nvml.h"

#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The kernel module asks for CAP_SYS_ADMIN. */
static bool is_administrator(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {0};
	if (syscall(SYS_capget, &header, data))
		return false;
	return data[CAP_TO_INDEX(CAP_SYS_ADMIN)].effective & CAP_TO_MASK(CAP_SYS_ADMIN);
}

/* A MIG device has no mode. */
PUBLIC unsigned nvmlDeviceGetComputeMode(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	if (!out || device->mig)
		return INVALID_ARGUMENT;
	*out = compute_mode(library_path, device->index);
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceSetComputeMode(struct device *device, unsigned mode)
{
	CHECK_DEVICE(device);
	if (device->mig || mode > COMPUTE_EXCLUSIVE_PROCESS)
		return INVALID_ARGUMENT;
	if (device->gpu->mig_enabled)
		return NOT_SUPPORTED;
	if (!is_administrator())
		return NO_PERMISSION;
	return compute_mode_set(library_path, device->index, mode) ? SUCCESS : NO_PERMISSION;
}
