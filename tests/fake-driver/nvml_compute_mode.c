/* The fake libnvidia-ml.so.1: compute modes. */
#include "compute_mode.h"
#include "nvml.h"

#include <unistd.h>

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
	if (geteuid())
		return NO_PERMISSION;
	return compute_mode_set(library_path, device->index, mode) ? SUCCESS : NO_PERMISSION;
}
