#include "config.h"

#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Only the library is mounted into a container, so its configuration is also appended to it: ld.so does not read the
 * bytes after the last section. */
static const char MARK[] = "\n#fake-driver\n";
static const long LONGEST = 64 * 1024;

static char *read_tail(const char *path)
{
	FILE *file = fopen(path, "re");
	if (!file)
		return NULL;
	char *text = NULL;
	if (fseek(file, 0, SEEK_END) == 0) {
		long size = ftell(file);
		long start = size > LONGEST ? size - LONGEST : 0;
		text = malloc((size_t)(size - start) + 1);
		if (text && fseek(file, start, SEEK_SET) == 0) {
			size_t got = fread(text, 1, (size_t)(size - start), file);
			/* A library contains many zero bytes, which are not text. */
			for (size_t i = 0; i < got; i++)
				if (!text[i])
					text[i] = ' ';
			text[got] = 0;
		}
	}
	fclose(file);
	return text;
}

bool config_beside(const char *library, const char *name, char *out, unsigned size)
{
	char real[PATH_MAX];
	if (!realpath(library, real))
		return false;
	int length = snprintf(out, size, "%s/%s", dirname(real), name);
	return length > 0 && (unsigned)length < size;
}

static char *read_text(const char *library)
{
	char beside[PATH_MAX + 16];
	if (!config_beside(library, "nvml.conf", beside, sizeof beside))
		return NULL;
	char *text = read_tail(beside);
	if (text)
		return text;
	text = read_tail(library);
	if (!text)
		return NULL;
	char *last = NULL;
	for (char *at = strstr(text, MARK); at; at = strstr(at + 1, MARK))
		last = at;
	if (!last) {
		free(text);
		return NULL;
	}
	memmove(text, last + sizeof MARK - 1, strlen(last + sizeof MARK - 1) + 1);
	return text;
}

/* The value of `key=` in a line, quoted or not. */
static bool value(const char *line, const char *key, char *out, size_t size)
{
	size_t length = strlen(key);
	for (const char *at = strchr(line, ' '); at; at = strchr(at, ' ')) {
		at++;
		if (strncmp(at, key, length) || at[length] != '=')
			continue;
		at += length + 1;
		char end = ' ';
		if (*at == '"') {
			end = '"';
			at++;
		}
		size_t used = strcspn(at, end == ' ' ? " \n" : "\"\n");
		if (used >= size)
			return false;
		memcpy(out, at, used);
		out[used] = 0;
		return true;
	}
	return false;
}

static unsigned number(const char *line, const char *key, unsigned otherwise)
{
	char text[32];
	return value(line, key, text, sizeof text) ? (unsigned)strtoul(text, NULL, 0) : otherwise;
}

/* A number, or `none` for UNSUPPORTED. */
static long long optional(const char *line, const char *key, long long otherwise)
{
	char text[32];
	if (!value(line, key, text, sizeof text))
		return otherwise;
	return strcmp(text, "none") ? strtoll(text, NULL, 0) : UNSUPPORTED;
}

/* The name of a call. `handle` is the one for the handle of the GPU. */
static void call_name(const char *line, const char *key, char *out, size_t size)
{
	if (!value(line, key, out, size))
		*out = 0;
	else if (!strcmp(out, "handle"))
		snprintf(out, size, "nvmlDeviceGetHandleByIndex_v2");
}

/* `nvlinks=1:4,2:2`: four links to GPU 1, two to GPU 2. */
static void link_counts(const char *line, int links[MAX_LINKS])
{
	char text[96];
	unsigned used = 0;
	for (unsigned i = 0; i < MAX_LINKS; i++)
		links[i] = -1;
	if (!value(line, "nvlinks", text, sizeof text))
		return;
	char *rest = NULL;
	for (char *pair = strtok_r(text, ",", &rest); pair; pair = strtok_r(NULL, ",", &rest)) {
		int to;
		unsigned count;
		if (sscanf(pair, "%d:%u", &to, &count) == 2)
			while (count-- && used < MAX_LINKS)
				links[used++] = to;
	}
}

static bool gpu_line(const char *line, struct config *config)
{
	if (config->gpu_count == MAX_GPUS)
		return false;
	struct gpu *gpu = &config->gpu[config->gpu_count];
	char text[96];
	gpu->minor = number(line, "minor", config->gpu_count);
	if (!value(line, "uuid", gpu->uuid, sizeof gpu->uuid))
		return false;
	if (!value(line, "bus", text, sizeof text) || sscanf(text, "%x:%x:%x", &gpu->domain, &gpu->bus, &gpu->device) != 3)
		return false;
	if (!value(line, "name", gpu->name, sizeof gpu->name))
		return false;
	if (!value(line, "cc", text, sizeof text) || sscanf(text, "%d.%d", &gpu->cc_major, &gpu->cc_minor) != 2)
		return false;
	gpu->brand = number(line, "brand", 14);
	gpu->memory_mib = number(line, "memory", 81559);
	gpu->fail = number(line, "fail", 0);
	gpu->fail_handle = number(line, "fail-handle", 0);
	call_name(line, "hang", gpu->hang, sizeof gpu->hang);
	call_name(line, "crash", gpu->crash, sizeof gpu->crash);
	gpu->memory_used_mib = number(line, "memory-used", 0);
	gpu->recovery_action = (int)optional(line, "recovery-action", 0);
	gpu->remap_failure = (int)optional(line, "remap-failure", 0);
	gpu->ecc = optional(line, "ecc", 0);
	gpu->util = (int)optional(line, "util", 0);
	gpu->temperature = (int)optional(line, "temperature", 32);
	gpu->power = (int)optional(line, "power", 62000);
	gpu->mem_util = (int)optional(line, "mem-util", gpu->util);
	gpu->encoder = (int)optional(line, "encoder", 0);
	gpu->decoder = (int)optional(line, "decoder", 0);
	gpu->mem_temperature = (int)optional(line, "mem-temperature", 38);
	gpu->sm_clock = (int)optional(line, "sm-clock", 345);
	gpu->mem_clock = (int)optional(line, "mem-clock", 2619);
	gpu->energy = optional(line, "energy", 81234567);
	gpu->pcie_replays = (int)optional(line, "pcie-replays", 0);
	gpu->remapped_cor = (int)optional(line, "remapped-cor", 0);
	gpu->remapped_unc = (int)optional(line, "remapped-unc", 0);
	gpu->power_limit = (int)optional(line, "power-limit", 700000);
	gpu->ecc_corrected = optional(line, "ecc-corrected", 0);
	gpu->memory_reserved_mib = number(line, "memory-reserved", 0);
	gpu->remap_pending = (int)optional(line, "remap-pending", gpu->remap_failure == UNSUPPORTED ? UNSUPPORTED : 0);
	gpu->clock_reasons = (int)optional(line, "clock-reasons", 1); /* idle */
	gpu->nvlink_sent = optional(line, "nvlink-sent", 0);
	gpu->nvlink_received = optional(line, "nvlink-received", 0);
	/* ECC errors, XIDs, changes of MIG, an unavailable GPU, the recovery action */
	gpu->events = number(line, "events", 0xc10b);
	gpu->numa = (int)optional(line, "numa", NO_NUMA);
	gpu->addressing = (int)optional(line, "addressing", UNSUPPORTED);
	link_counts(line, gpu->links);
	gpu->mig_enabled = strstr(line, " mig") != NULL;
	config->gpu_count++;
	return true;
}

static bool mig_line(const char *line, struct config *config)
{
	unsigned index = number(line, "gpu", MAX_GPUS);
	if (index >= config->gpu_count)
		return false;
	struct gpu *gpu = &config->gpu[index];
	if (gpu->mig_count == MAX_MIG)
		return false;
	struct mig *mig = &gpu->mig[gpu->mig_count++];
	mig->gi = number(line, "gi", 0);
	mig->ci = number(line, "ci", 0);
	mig->cap_gi = number(line, "cap-gi", 0);
	mig->cap_ci = number(line, "cap-ci", 0);
	mig->memory_used_mib = number(line, "memory-used", 0);
	mig->memory_reserved_mib = number(line, "memory-reserved", 0);
	if (!value(line, "profile", mig->profile, sizeof mig->profile))
		*mig->profile = 0;
	return value(line, "uuid", mig->uuid, sizeof mig->uuid);
}

bool config_process(const char *line, struct process *process)
{
	process->gpu = number(line, "gpu", 0);
	process->pid = number(line, "pid", 0);
	process->memory_mib = optional(line, "memory", 0);
	if (!value(line, "kind", process->kind, sizeof process->kind))
		strcpy(process->kind, "compute");
	return process->pid;
}

static bool process_line(const char *line, struct config *config)
{
	if (config->process_count == MAX_PROCESSES)
		return false;
	return config_process(line, &config->process[config->process_count++]);
}

/* Lines of one word */
static bool flag_line(const char *line, struct config *config)
{
	const struct {
		const char *name;
		bool *flag;
	} flags[] = {
		{"init-hang", &config->init_hang},
		{"init-crash", &config->init_crash},
		{"wsl", &config->wsl},
		{"count-all", &config->count_all},
		{"mps-fault", &config->mps_fault},
		{"mps-server-fails", &config->mps_server_fails},
		{"mps-single-user", &config->mps_single_user},
	};
	for (unsigned i = 0; i < sizeof flags / sizeof *flags; i++)
		if (!strcmp(line, flags[i].name))
			return *flags[i].flag = true;
	return false;
}

static bool config_line(const char *line, struct config *config)
{
	unsigned major, minor;
	if (!*line || *line == '#')
		return true;
	if (!strncmp(line, "gpu ", 4))
		return gpu_line(line, config);
	if (!strncmp(line, "mig ", 4))
		return mig_line(line, config);
	if (!strncmp(line, "process ", 8))
		return process_line(line, config);
	if (sscanf(line, "driver %79s", config->driver) == 1)
		return true;
	if (sscanf(line, "cuda %u.%u", &major, &minor) == 2) {
		config->cuda = (int)(major * 1000 + minor * 10);
		return true;
	}
	if (sscanf(line, "init-delay-ms %u", &config->init_delay_ms) == 1)
		return true;
	if (sscanf(line, "init-error %u", &config->init_error) == 1)
		return true;
	if (config->not_supported_count < MAX_QUIRKS &&
	    sscanf(line, "not-supported %63s", config->not_supported[config->not_supported_count]) == 1) {
		config->not_supported_count++;
		return true;
	}
	if (config->missing_count < MAX_QUIRKS &&
	    sscanf(line, "missing %63s", config->missing[config->missing_count]) == 1) {
		config->missing_count++;
		return true;
	}
	return flag_line(line, config);
}

bool config_read(const char *library, struct config *config)
{
	memset(config, 0, sizeof *config);
	char *text = read_text(library);
	if (!text)
		return false;
	bool good = true;
	char *rest = NULL;
	for (char *line = strtok_r(text, "\n", &rest); line && good; line = strtok_r(NULL, "\n", &rest))
		good = config_line(line, config);
	free(text);
	return good && *config->driver;
}
