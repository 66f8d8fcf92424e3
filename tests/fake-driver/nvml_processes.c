/* The fake libnvidia-ml.so.1: the processes on GPUs. */
#include "nvml.h"

#include <errno.h>
#include <glob.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* nvmlProcessInfo_v2_t, which is nvmlProcessInfo_t */
struct process_info {
	unsigned pid;
	unsigned long long used_memory;
	unsigned gpu_instance, compute_instance;
};

static const unsigned long long NOT_AVAILABLE = ~0ULL;
/* What the real library stores for a GPU that is not in MIG mode. */
static const unsigned NO_INSTANCE = ~0U;

/* The driver lists a process by its id in the PID namespace of the caller, and omits it if it has none there. */
static bool is_listed(const struct process *process, const struct device *device, const char *kind)
{
	if (process->gpu != device->index || strcmp(process->kind, kind))
		return false;
	return getpgid((pid_t)process->pid) >= 0 || errno != ESRCH;
}

enum { MAX_LISTED = 4 * MAX_PROCESSES };

static void add_file(const char *path, struct process all[MAX_LISTED], unsigned *count)
{
	char line[128];
	FILE *file = fopen(path, "re");
	while (file && *count < MAX_LISTED && fgets(line, sizeof line, file))
		*count += config_process(line, &all[*count]);
	if (file)
		fclose(file);
}

/* Returns the processes of the configuration, those that the MPS daemon lists for a GPU in `nvml.processes-INDEX`, and the CUDA programs of
 * the host, which have `nvml.processes-INDEX.PID`. */
static const struct process *all_processes(unsigned gpu, unsigned *count)
{
	static struct process all[MAX_LISTED];
	char path[4096 + 64], name[32];
	glob_t found;
	const struct process *configured = processes(count);
	memcpy(all, configured, *count * sizeof *all);
	snprintf(name, sizeof name, "nvml.processes-%u", gpu);
	if (!config_beside(library_path, name, path, sizeof path))
		return all;
	add_file(path, all, count);
	snprintf(name, sizeof name, "nvml.processes-%u.*", gpu);
	config_beside(library_path, name, path, sizeof path);
	if (glob(path, 0, NULL, &found))
		return all;
	for (size_t i = 0; i < found.gl_pathc; i++)
		add_file(found.gl_pathv[i], all, count);
	globfree(&found);
	return all;
}

/* As the real library, it stores nothing if there is not enough space, and then returns the number of elements that are needed. */
static unsigned list(const struct device *device, const char *kind, unsigned *count, struct process_info *out)
{
	unsigned all, found = 0;
	const struct process *process = all_processes(device->index, &all);
	/* A MIG device has a list, too; the configuration has processes of whole GPUs. */
	if (device->mig) {
		*count = 0;
		return SUCCESS;
	}
	for (unsigned i = 0; i < all; i++)
		found += is_listed(&process[i], device, kind);
	if (found > *count || !out) {
		*count = found;
		return found ? INSUFFICIENT_SIZE : SUCCESS;
	}
	*count = 0;
	for (unsigned i = 0; i < all; i++) {
		if (!is_listed(&process[i], device, kind))
			continue;
		long long memory = process[i].memory_mib;
		out[(*count)++] = (struct process_info){
			.pid = process[i].pid,
			.used_memory = memory == UNSUPPORTED ? NOT_AVAILABLE : (unsigned long long)memory << 20,
			.gpu_instance = NO_INSTANCE,
			.compute_instance = NO_INSTANCE,
		};
	}
	return SUCCESS;
}

#define LIST(name, kind) \
	PUBLIC unsigned name(struct device *device, unsigned *count, struct process_info *out) \
	{ \
		CHECK_DEVICE(device); \
		return count ? list(device, kind, count, out) : INVALID_ARGUMENT; \
	}

LIST(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
LIST(nvmlDeviceGetComputeRunningProcesses_v2, "compute")
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics")
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps")
