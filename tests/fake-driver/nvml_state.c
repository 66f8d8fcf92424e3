/* The fake libnvidia-ml.so.1: the state, load and topology of GPUs. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

struct memory {
	unsigned long long total, free, used;
};

struct memory_v2 {
	unsigned version;
	unsigned long long total, reserved, free, used;
};

struct utilization {
	unsigned gpu, memory;
};

union value {
	double d;
	unsigned ui;
	unsigned long ul;
	unsigned long long ull;
	signed long long sll;
	int si;
};

enum value_type { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3 };

struct sample {
	unsigned long long time; /* in microseconds */
	union value value;
};

struct field {
	unsigned id, scope;
	long long time, latency;
	unsigned type;
	unsigned code;
	union value value;
};

static unsigned long long now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

bool parse_profile(const char *text, struct attributes *out)
{
	unsigned compute, gpu;
	unsigned long long gib;
	if (sscanf(text, "%uc.%ug.%llugb", &compute, &gpu, &gib) != 3) {
		if (sscanf(text, "%ug.%llugb", &gpu, &gib) != 2)
			return false;
		compute = gpu;
	}
	*out = (struct attributes){
		.multiprocessors = compute * MULTIPROCESSORS,
		.copy_engines = gpu,
		.decoders = gpu,
		.gpu_slices = gpu,
		.compute_slices = compute,
		/* A part is reserved, as on a real GPU. */
		.memory_mib = gib * 1024 - 256,
	};
	return true;
}

PUBLIC unsigned nvmlDeviceGetAttributes_v2(struct device *device, struct attributes *out)
{
	CHECK_DEVICE(device);
	if (!device->mig)
		return INVALID_ARGUMENT;
	return parse_profile(device->mig->profile, out) ? SUCCESS : NOT_SUPPORTED;
}

struct addressing_mode {
	unsigned version, value;
};

PUBLIC unsigned nvmlDeviceGetAddressingMode(struct device *device, struct addressing_mode *out)
{
	CHECK_DEVICE(device);
	if (out->version != (1U << 24 | sizeof *out))
		return ARGUMENT_VERSION_MISMATCH;
	if (device->mig || device->gpu->addressing == UNSUPPORTED)
		return NOT_SUPPORTED;
	out->value = (unsigned)device->gpu->addressing;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetMemoryInfo(struct device *device, struct memory *out)
{
	CHECK_DEVICE(device);
	struct attributes part;
	unsigned long long total = device->gpu->memory_mib, used = device->gpu->memory_used_mib;
	if (device->mig && parse_profile(device->mig->profile, &part)) {
		total = part.memory_mib;
		used = device->mig->memory_used_mib;
	}
	*out = (struct memory){.total = total << 20, .used = used << 20, .free = (total - used) << 20};
	return SUCCESS;
}

/* The same memory, but `used` does not include what is reserved. */
PUBLIC unsigned nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *out)
{
	struct memory all;
	CHECK_DEVICE(device);
	if (out->version != (2U << 24 | sizeof *out))
		return ARGUMENT_VERSION_MISMATCH;
	unsigned code = nvmlDeviceGetMemoryInfo(device, &all);
	if (code)
		return code;
	unsigned long long reserved = device->mig ? device->mig->memory_reserved_mib : device->gpu->memory_reserved_mib;
	reserved <<= 20;
	if (reserved > all.used)
		reserved = all.used;
	out->total = all.total;
	out->free = all.free;
	out->reserved = reserved;
	out->used = all.used - reserved;
	return SUCCESS;
}

static unsigned clock_reasons(const struct device *device, unsigned long long *out)
{
	if (!out)
		return INVALID_ARGUMENT;
	if (device->mig || device->gpu->clock_reasons == UNSUPPORTED)
		return NOT_SUPPORTED;
	*out = (unsigned long long)device->gpu->clock_reasons;
	return SUCCESS;
}

/* The older name, which newer drivers have, too. */
PUBLIC unsigned nvmlDeviceGetCurrentClocksThrottleReasons(struct device *device, unsigned long long *out)
{
	CHECK_DEVICE(device);
	return clock_reasons(device, out);
}

PUBLIC unsigned nvmlDeviceGetCurrentClocksEventReasons(struct device *device, unsigned long long *out)
{
	CHECK_DEVICE(device);
	return clock_reasons(device, out);
}

PUBLIC unsigned nvmlDeviceGetUtilizationRates(struct device *device, struct utilization *out)
{
	CHECK_DEVICE(device);
	if (device->gpu->mig_enabled || device->gpu->util == UNSUPPORTED)
		return NOT_SUPPORTED;
	*out = (struct utilization){.gpu = (unsigned)device->gpu->util, .memory = (unsigned)device->gpu->mem_util};
	return SUCCESS;
}

enum { CLOCK_GRAPHICS, CLOCK_SM, CLOCK_MEM, CLOCK_VIDEO };

PUBLIC unsigned nvmlDeviceGetClockInfo(struct device *device, unsigned type, unsigned *out)
{
	CHECK_DEVICE(device);
	if (type > CLOCK_VIDEO || device->mig || !out)
		return INVALID_ARGUMENT;
	int clock = type == CLOCK_MEM ? device->gpu->mem_clock : device->gpu->sm_clock;
	if (clock == UNSUPPORTED)
		return NOT_SUPPORTED;
	*out = (unsigned)clock;
	return SUCCESS;
}

static unsigned codec(const struct device *device, int percent, unsigned *out, unsigned *period_us)
{
	if (!out || !period_us)
		return INVALID_ARGUMENT;
	if (device->gpu->mig_enabled || percent == UNSUPPORTED)
		return NOT_SUPPORTED;
	*out = (unsigned)percent;
	*period_us = 167000;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetEncoderUtilization(struct device *device, unsigned *out, unsigned *period_us)
{
	CHECK_DEVICE(device);
	return codec(device, device->gpu->encoder, out, period_us);
}

PUBLIC unsigned nvmlDeviceGetDecoderUtilization(struct device *device, unsigned *out, unsigned *period_us)
{
	CHECK_DEVICE(device);
	return codec(device, device->gpu->decoder, out, period_us);
}

enum { SENSOR_GPU = 0 };

PUBLIC unsigned nvmlDeviceGetTemperature(struct device *device, unsigned sensor, unsigned *out)
{
	CHECK_DEVICE(device);
	if (sensor != SENSOR_GPU || device->mig || !out)
		return INVALID_ARGUMENT;
	if (device->gpu->temperature == UNSUPPORTED)
		return NOT_SUPPORTED;
	*out = (unsigned)device->gpu->temperature;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetPowerUsage(struct device *device, unsigned *out)
{
	CHECK_DEVICE(device);
	if (device->mig || !out)
		return INVALID_ARGUMENT;
	if (device->gpu->power == UNSUPPORTED)
		return NOT_SUPPORTED;
	*out = (unsigned)device->gpu->power;
	return SUCCESS;
}

/* The real library keeps this many samples, 6 for each second. */
enum { SAMPLES = 120, SAMPLE_US = 1000000 / 6, FIRST_UTILIZATION = 1, LAST_UTILIZATION = 4 };

PUBLIC unsigned nvmlDeviceGetSamples(struct device *device, unsigned type, unsigned long long last_seen, unsigned *value_type,
				     unsigned *count, struct sample *out)
{
	CHECK_DEVICE(device);
	if (!value_type || !count)
		return INVALID_ARGUMENT;
	if (type < FIRST_UTILIZATION || type > LAST_UTILIZATION || device->gpu->mig_enabled ||
	    device->gpu->util == UNSUPPORTED)
		return NOT_SUPPORTED;
	*value_type = UNSIGNED_INT;
	if (!out) {
		*count = SAMPLES;
		return SUCCESS;
	}
	unsigned long long newest = now_us() / SAMPLE_US * SAMPLE_US;
	unsigned filled = 0;
	for (unsigned age = SAMPLES; age-- && filled < *count;) {
		unsigned long long time = newest - (unsigned long long)age * SAMPLE_US;
		if (time > last_seen)
			out[filled++] = (struct sample){.time = time, .value.ui = (unsigned)device->gpu->util};
	}
	*count = filled;
	return filled ? SUCCESS : NOT_FOUND;
}

/* Each link has an equal part. */
static long long nvlink_data(const struct gpu *gpu, unsigned scope, long long all)
{
	unsigned links = 0;
	while (links < MAX_LINKS && gpu->links[links] >= 0)
		links++;
	if (scope == ~0U)
		return links ? all : UNSUPPORTED;
	return scope < links ? all / links : UNSUPPORTED;
}

static void fill_field(const struct gpu *gpu, struct field *field)
{
	long long value = UNSUPPORTED;
	field->type = UNSIGNED_INT;
	switch (field->id) {
	case 3: /* single-bit errors since the driver was loaded */
		value = gpu->ecc_corrected;
		field->type = UNSIGNED_LONG_LONG;
		break;
	case 4: /* double-bit errors since the driver was loaded */
		value = gpu->ecc;
		field->type = UNSIGNED_LONG_LONG;
		break;
	case 82: /* the temperature of the memory */
		value = gpu->mem_temperature;
		break;
	case 83: /* the energy since the driver was loaded */
		value = gpu->energy;
		field->type = UNSIGNED_LONG_LONG;
		break;
	case 94: /* PCIe replays */
		value = gpu->pcie_replays;
		break;
	case 138: /* sent through the NVLink `scope`, or through all of them */
		value = nvlink_data(gpu, field->scope, gpu->nvlink_sent);
		field->type = UNSIGNED_LONG_LONG;
		break;
	case 139: /* received */
		value = nvlink_data(gpu, field->scope, gpu->nvlink_received);
		field->type = UNSIGNED_LONG_LONG;
		break;
	case 142: /* rows remapped because of correctable errors */
		value = gpu->remapped_cor;
		break;
	case 143: /* rows remapped because of uncorrectable errors */
		value = gpu->remapped_unc;
		break;
	case 144: /* a row remapping is pending */
		value = gpu->remap_pending;
		break;
	case 145: /* a row remapping failed */
		value = gpu->remap_failure;
		break;
	case 190: /* the power limit in milliwatts */
		value = gpu->power_limit;
		break;
	case 230: /* the recovery action */
		value = gpu->recovery_action;
		break;
	}
	field->time = (long long)now_us();
	field->latency = 0;
	field->code = value == UNSUPPORTED ? NOT_SUPPORTED : SUCCESS;
	memset(&field->value, 0, sizeof field->value);
	if (value == UNSUPPORTED)
		return;
	if (field->type == UNSIGNED_INT)
		field->value.ui = (unsigned)value;
	else
		field->value.ull = (unsigned long long)value;
}

PUBLIC unsigned nvmlDeviceGetFieldValues(struct device *device, int count, struct field *fields)
{
	CHECK_DEVICE(device);
	if (count <= 0 || !fields)
		return INVALID_ARGUMENT;
	for (int i = 0; i < count; i++)
		fill_field(device->gpu, &fields[i]);
	return SUCCESS;
}

enum { LEVEL_INTERNAL = 0, LEVEL_HOSTBRIDGE = 30, LEVEL_SYSTEM = 50 };

PUBLIC unsigned nvmlDeviceGetTopologyCommonAncestor(struct device *a, struct device *b, unsigned *out)
{
	CHECK_DEVICE(a);
	CHECK_DEVICE(b);
	if (a->gpu == b->gpu)
		*out = LEVEL_INTERNAL;
	else
		*out = a->gpu->numa == b->gpu->numa ? LEVEL_HOSTBRIDGE : LEVEL_SYSTEM;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetNvLinkState(struct device *device, unsigned link, unsigned *out)
{
	CHECK_DEVICE(device);
	if (link >= MAX_LINKS || !out)
		return INVALID_ARGUMENT;
	if (device->gpu->links[0] < 0)
		return NOT_SUPPORTED;
	*out = device->gpu->links[link] >= 0;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *device, unsigned link, struct pci_info *out)
{
	CHECK_DEVICE(device);
	if (link >= MAX_LINKS || !out)
		return INVALID_ARGUMENT;
	int to = device->gpu->links[link];
	if (to < 0)
		return NOT_SUPPORTED;
	static const struct gpu a_switch = {.bus = 0xc0};
	bool is_gpu = (unsigned)to < device_count;
	fill_pci_info(is_gpu ? devices[to].gpu : &a_switch, out);
	return SUCCESS;
}
