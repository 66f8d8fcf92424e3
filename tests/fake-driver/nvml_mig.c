/* The instances of a GPU in MIG mode, and their profiles, as NVIDIA's device plugin asks for them. The numbers of the profiles are those
 * of an A100. */
#include <stdlib.h>

#include "nvml.h"

struct placement {
	unsigned start, size;
};

struct gpu_profile_info {
	unsigned id, is_p2p_supported, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
	unsigned long long memory_mib;
};

struct compute_profile_info {
	unsigned id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
};

struct gpu_instance {
	struct device *parent;
	const struct mig *mig;
};

struct compute_instance {
	struct gpu_instance *gpu_instance;
	const struct mig *mig;
};

struct gpu_instance_info {
	struct device *device;
	unsigned id, profile;
	struct placement placement;
};

struct compute_instance_info {
	struct device *device;
	struct gpu_instance *gpu_instance;
	unsigned id, profile;
	struct placement placement;
};

/* The number of slices of each kind of profile, by NVML_GPU_INSTANCE_PROFILE_* and NVML_COMPUTE_INSTANCE_PROFILE_*, and the numbers of a
 * GPU's profiles. */
static const unsigned slices_of[] = {1, 2, 3, 4, 7};
static const unsigned gpu_ids[] = {19, 14, 9, 5, 0};
enum { PROFILES = sizeof slices_of / sizeof *slices_of, ALL_SLICES = 7 };

static struct gpu_instance gpu_instances[MAX_GPUS][MAX_MIG];
static struct compute_instance compute_instances[MAX_GPUS][MAX_MIG];

static bool kind_of(unsigned slices, unsigned *kind)
{
	for (*kind = 0; *kind < PROFILES; ++*kind)
		if (slices_of[*kind] == slices)
			return true;
	return false;
}

static struct device *parent_of(const struct device *device)
{
	for (unsigned i = 0; i < device_count; i++)
		if (devices[i].gpu == device->gpu)
			return &devices[i];
	return NULL;
}

PUBLIC unsigned nvmlDeviceIsMigDeviceHandle(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	*out = device->mig != NULL;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *device, struct device **out)
{
	CHECK_DEVICE(device);
	if (!device->mig)
		return INVALID_ARGUMENT;
	*out = parent_of(device);
	return *out ? SUCCESS : NOT_FOUND;
}

PUBLIC unsigned nvmlDeviceGetGpuInstanceProfileInfo(struct device *device, unsigned kind, struct gpu_profile_info *out)
{
	CHECK_DEVICE(device);
	if (device->mig || !out)
		return INVALID_ARGUMENT;
	if (kind >= PROFILES || !device->gpu->mig_enabled)
		return NOT_SUPPORTED;
	unsigned slices = slices_of[kind];
	*out = (struct gpu_profile_info){
		.id = gpu_ids[kind],
		.slices = slices,
		.instances = ALL_SLICES / slices,
		.multiprocessors = slices * MULTIPROCESSORS,
		.copy_engines = slices,
		.decoders = slices,
		.memory_mib = device->gpu->memory_mib / 8 * (slices == ALL_SLICES ? 8 : slices),
	};
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetGpuInstanceById(struct device *device, unsigned id, struct gpu_instance **out)
{
	CHECK_DEVICE(device);
	if (device->mig || !out)
		return INVALID_ARGUMENT;
	for (unsigned m = 0; m < device->gpu->mig_count; m++) {
		if (device->gpu->mig[m].gi != id)
			continue;
		*out = &gpu_instances[device->index][m];
		**out = (struct gpu_instance){.parent = device, .mig = &device->gpu->mig[m]};
		return SUCCESS;
	}
	return NOT_FOUND;
}

PUBLIC unsigned nvmlGpuInstanceGetInfo(struct gpu_instance *instance, struct gpu_instance_info *out)
{
	CHECK();
	struct attributes part;
	unsigned kind;
	if (!parse_profile(instance->mig->profile, &part) || !kind_of(part.gpu_slices, &kind))
		return NOT_SUPPORTED;
	*out = (struct gpu_instance_info){
		.device = instance->parent,
		.id = instance->mig->gi,
		.profile = gpu_ids[kind],
		/* As if all instances had this size, and their numbers began with 0 */
		.placement = {.start = instance->mig->gi * part.gpu_slices % 8, .size = part.gpu_slices},
	};
	return SUCCESS;
}

PUBLIC unsigned nvmlGpuInstanceGetComputeInstanceById(struct gpu_instance *instance, unsigned id, struct compute_instance **out)
{
	CHECK();
	const struct gpu *gpu = instance->parent->gpu;
	for (unsigned m = 0; m < gpu->mig_count; m++) {
		if (gpu->mig[m].gi != instance->mig->gi || gpu->mig[m].ci != id)
			continue;
		*out = &compute_instances[instance->parent->index][m];
		**out = (struct compute_instance){.gpu_instance = instance, .mig = &gpu->mig[m]};
		return SUCCESS;
	}
	return NOT_FOUND;
}

/* `engine` is NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, the only one. */
PUBLIC unsigned nvmlGpuInstanceGetComputeInstanceProfileInfo(struct gpu_instance *instance, unsigned kind, unsigned engine,
							     struct compute_profile_info *out)
{
	CHECK();
	struct attributes part;
	if (!parse_profile(instance->mig->profile, &part))
		return NOT_SUPPORTED;
	if (engine || kind >= PROFILES || slices_of[kind] > part.gpu_slices)
		return NOT_SUPPORTED;
	*out = (struct compute_profile_info){
		.id = kind,
		.slices = slices_of[kind],
		.instances = part.gpu_slices / slices_of[kind],
		.multiprocessors = slices_of[kind] * MULTIPROCESSORS,
		.copy_engines = part.copy_engines,
		.decoders = part.decoders,
	};
	return SUCCESS;
}

PUBLIC unsigned nvmlComputeInstanceGetInfo_v2(struct compute_instance *instance, struct compute_instance_info *out)
{
	CHECK();
	struct attributes part;
	unsigned kind;
	if (!parse_profile(instance->mig->profile, &part) || !kind_of(part.compute_slices, &kind))
		return NOT_SUPPORTED;
	*out = (struct compute_instance_info){
		.device = instance->gpu_instance->parent,
		.gpu_instance = instance->gpu_instance,
		.id = instance->mig->ci,
		.profile = kind,
		.placement = {.size = part.compute_slices},
	};
	return SUCCESS;
}
