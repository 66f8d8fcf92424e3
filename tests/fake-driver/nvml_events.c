/* The fake libnvidia-ml.so.1: event sets. The events are lines that are appended to `nvml.events` in the directory of the library:
 * `xid INDEX CODE`, `unavailable INDEX` and `recovery INDEX`, with NVML's index of the GPU. */
#include "nvml.h"

#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { XID = 0x8, UNAVAILABLE = 0x4000, RECOVERY = 0x8000, NO_INSTANCE = 0xffffffff };

struct event_set {
	unsigned long long types[MAX_GPUS]; /* registered, by GPU */
	long since[MAX_GPUS];               /* the place in the file at that time */
	long place;                         /* the end of what has been read */
	int watch;                          /* an inotify descriptor for the directory of the library, or -1 */
};

struct event {
	struct device *device;
	unsigned long long type, data;
	unsigned gpu_instance, compute_instance;
};

static bool events_path(char *out, unsigned size)
{
	return config_beside(library_path, "nvml.events", out, size);
}

static long events_size(void)
{
	char path[PATH_MAX + 16];
	struct stat file;
	return events_path(path, sizeof path) && !stat(path, &file) ? (long)file.st_size : 0;
}

static int watch_directory(void)
{
	char path[PATH_MAX + 16];
	if (!config_beside(library_path, ".", path, sizeof path))
		return -1;
	int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	if (watch >= 0 && inotify_add_watch(watch, path, IN_MODIFY | IN_CREATE | IN_MOVED_TO) < 0) {
		close(watch);
		watch = -1;
	}
	return watch;
}

PUBLIC unsigned nvmlEventSetCreate(struct event_set **out)
{
	CHECK();
	if (!out)
		return INVALID_ARGUMENT;
	struct event_set *set = calloc(1, sizeof *set);
	if (!set)
		return UNKNOWN;
	set->place = events_size();
	set->watch = watch_directory();
	*out = set;
	return SUCCESS;
}

PUBLIC unsigned nvmlEventSetFree(struct event_set *set)
{
	CHECK();
	if (!set)
		return INVALID_ARGUMENT;
	if (set->watch >= 0)
		close(set->watch);
	free(set);
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceGetSupportedEventTypes(struct device *device, unsigned long long *out)
{
	CHECK_DEVICE(device);
	*out = device->gpu->events;
	return SUCCESS;
}

PUBLIC unsigned nvmlDeviceRegisterEvents(struct device *device, unsigned long long types, struct event_set *set)
{
	CHECK_DEVICE(device);
	if (!set || device->mig)
		return INVALID_ARGUMENT;
	if (!device->gpu->events || types & ~(unsigned long long)device->gpu->events)
		return NOT_SUPPORTED;
	if (!set->types[device->index])
		set->since[device->index] = events_size();
	set->types[device->index] |= types;
	return SUCCESS;
}

static bool parse(const char *line, unsigned *index, struct event *event)
{
	*event = (struct event){.gpu_instance = NO_INSTANCE, .compute_instance = NO_INSTANCE};
	if (sscanf(line, "xid %u %llu", index, &event->data) == 2)
		event->type = XID;
	else if (sscanf(line, "unavailable %u", index) == 1)
		event->type = UNAVAILABLE;
	else if (sscanf(line, "recovery %u", index) == 1)
		event->type = RECOVERY;
	return event->type && *index < device_count;
}

/* The next event of the file that this set is registered for. */
static bool next_event(struct event_set *set, struct event *event)
{
	char path[PATH_MAX + 16], line[128];
	FILE *file = events_path(path, sizeof path) && events_size() != set->place ? fopen(path, "re") : NULL;
	if (!file)
		return false;
	/* The file was replaced. */
	if (events_size() < set->place) {
		set->place = 0;
		memset(set->since, 0, sizeof set->since);
	}
	bool found = false;
	fseek(file, set->place, SEEK_SET);
	while (!found && fgets(line, sizeof line, file) && strchr(line, '\n')) {
		unsigned index;
		found = parse(line, &index, event) && set->types[index] & event->type && set->place >= set->since[index];
		if (found)
			event->device = &devices[index];
		set->place = ftell(file);
	}
	fclose(file);
	return found;
}

static bool any_lost(const struct event_set *set)
{
	for (unsigned i = 0; i < device_count; i++)
		if (set->types[i] && devices[i].gpu->fail == GPU_IS_LOST)
			return true;
	return false;
}

static long long now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000ll + now.tv_nsec / 1000000;
}

/* Waits for a change in the directory of the library, or without a watch for a short time. */
static void wait_for_change(const struct event_set *set, int ms)
{
	char changes[1024];
	if (set->watch < 0) {
		sleep_ms(ms < 50 ? (unsigned)ms : 50);
		return;
	}
	struct pollfd watched = {.fd = set->watch, .events = POLLIN};
	poll(&watched, 1, ms);
	while (read(set->watch, changes, sizeof changes) > 0)
		;
}

PUBLIC unsigned nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout_ms)
{
	CHECK();
	if (!set || !event)
		return INVALID_ARGUMENT;
	long long end = now_ms() + timeout_ms;
	for (;;) {
		for (unsigned i = 0; i < device_count; i++)
			if (set->types[i])
				misbehave(__func__, devices[i].gpu);
		if (next_event(set, event))
			return SUCCESS;
		if (any_lost(set))
			return GPU_IS_LOST;
		long long left = end - now_ms();
		if (left <= 0)
			return TIMEOUT;
		wait_for_change(set, (int)left);
		CHECK();
	}
}
