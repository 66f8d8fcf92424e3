/* A fake nvidia-smi. Like the real one, it loads NVML with the dynamic loader of the system on which it runs, and it
 * prints the table, list and errors of the real one. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct memory {
	unsigned long long total, free, used;
};

static void *nvml;

/* The real one also fails at the first use of a missing function. */
static void *function(const char *name)
{
	void *found = dlsym(nvml, name);
	if (!found) {
		fprintf(stderr, "nvidia-smi: %s\n", dlerror());
		exit(13);
	}
	return found;
}

#define CALL(name, types, ...) ((unsigned(*) types)function(#name))(__VA_ARGS__)

static unsigned complain(unsigned code)
{
	switch (code) {
	case 4:
		puts("Failed to initialize NVML: Insufficient Permissions");
		break;
	case 9:
		puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
		     "latest NVIDIA driver is installed and running.\n");
		break;
	case 18:
		puts("Failed to initialize NVML: Driver/library version mismatch");
		break;
	default:
		puts("Failed to initialize NVML: Unknown Error");
	}
	return code;
}

/* The real driver has the node open while nvidia-smi runs; a GPU that cannot be opened is not shown. */
static void check_node(unsigned minor)
{
	char path[32];
	snprintf(path, sizeof path, "/dev/nvidia%u", minor);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0 && errno != ENXIO) {
		printf("Unable to determine the device handle for GPU with minor %u: %s\n", minor, strerror(errno));
		exit(4);
	}
	if (fd >= 0)
		close(fd);
}

static void *handle(unsigned index)
{
	void *device = NULL;
	unsigned code = CALL(nvmlDeviceGetHandleByIndex_v2, (unsigned, void **), index, &device);
	if (code) {
		printf("Unable to determine the device handle for GPU %u: %s\n", index,
		       ((const char *(*)(unsigned))function("nvmlErrorString"))(code));
		return NULL;
	}
	return device;
}

/* Whether the option -i, if there is one, names the GPU. */
static bool is_selected(unsigned index, const char *only)
{
	char uuid[96] = "", number[16];
	void *device = only ? handle(index) : NULL;
	snprintf(number, sizeof number, "%u", index);
	if (!only || !strcmp(only, number))
		return true;
	if (device)
		CALL(nvmlDeviceGetUUID, (void *, char *, unsigned), device, uuid, sizeof uuid);
	return !strcmp(only, uuid);
}

static void list_mig(void *device)
{
	for (unsigned i = 0;; i++) {
		void *mig = NULL;
		char uuid[96] = "";
		if (CALL(nvmlDeviceGetMigDeviceHandleByIndex, (void *, unsigned, void **), device, i, &mig))
			return;
		CALL(nvmlDeviceGetUUID, (void *, char *, unsigned), mig, uuid, sizeof uuid);
		printf("  MIG 1g.10gb     Device %2u: (UUID: %s)\n", i, uuid);
	}
}

static void list(unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		void *device = handle(i);
		char name[96] = "Unknown", uuid[96] = "Unknown";
		if (!device)
			continue;
		CALL(nvmlDeviceGetName, (void *, char *, unsigned), device, name, sizeof name);
		CALL(nvmlDeviceGetUUID, (void *, char *, unsigned), device, uuid, sizeof uuid);
		printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
		list_mig(device);
	}
}

/* The table of driver 535: one column of 87, or three of 41, 22 and 22. */
static void line(char left, char middle, char fill)
{
	putchar(left);
	for (int i = 0; i < 87; i++)
		putchar(i == 41 || i == 64 ? middle : fill);
	putchar(left);
	putchar('\n');
}

struct pci {
	char legacy[16];
	unsigned domain, bus, device, id, subsystem;
	char text[32];
};

static void row(unsigned index, void *device)
{
	char name[96] = "Unknown", bus[64] = "Unknown";
	struct memory memory = {0};
	unsigned mig = 0, pending, persistence = 0;
	struct pci pci = {0};
	CALL(nvmlDeviceGetName, (void *, char *, unsigned), device, name, sizeof name);
	CALL(nvmlDeviceGetMemoryInfo, (void *, struct memory *), device, &memory);
	CALL(nvmlDeviceGetPersistenceMode, (void *, unsigned *), device, &persistence);
	if (!CALL(nvmlDeviceGetPciInfo_v3, (void *, void *), device, &pci))
		snprintf(bus, sizeof bus, "%s", pci.text);
	const char *mode = "N/A";
	if (!CALL(nvmlDeviceGetMigMode, (void *, unsigned *, unsigned *), device, &mig, &pending))
		mode = mig ? "Enabled" : "Disabled";
	printf("| %3u  %-30.30s %3s | %-16s Off | %20s |\n", index, name, persistence ? "On" : "Off", bus, "0");
	printf("| N/A   30C    P0              70W / 700W | %6lluMiB / %5lluMiB |      0%%      Default |\n",
	       memory.used >> 20, memory.total >> 20);
	printf("| %39s | %20s | %20s |\n", "", "", mode);
	line('+', '+', '-');
}

static void table(unsigned count)
{
	char driver[80] = "N/A", nvml_version[80] = "N/A", now[64];
	int cuda = 0;
	time_t clock = time(NULL);
	CALL(nvmlSystemGetDriverVersion, (char *, unsigned), driver, sizeof driver);
	CALL(nvmlSystemGetNVMLVersion, (char *, unsigned), nvml_version, sizeof nvml_version);
	CALL(nvmlSystemGetCudaDriverVersion, (int *), &cuda);
	strftime(now, sizeof now, "%a %b %e %H:%M:%S %Y", localtime(&clock));
	puts(now);
	line('+', '-', '-');
	printf("| NVIDIA-SMI %-22s Driver Version: %-12s CUDA Version: %2d.%-5d |\n", driver, driver, cuda / 1000,
	       cuda % 100 / 10);
	line('|', '+', '-');
	puts("| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |");
	puts("| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |");
	puts("|                                         |                      |               MIG M. |");
	line('|', '+', '=');
	for (unsigned i = 0; i < count; i++) {
		void *device = handle(i);
		if (device)
			row(i, device);
	}
	puts("");
	line('+', '-', '-');
	printf("| %-85s |\n", "Processes:");
	printf("| %-85s |\n", " GPU   GI   CI        PID   Type   Process name                          GPU Memory");
	line('|', '=', '=');
	printf("| %-85s |\n", " No running processes found");
	line('+', '-', '-');
}

static const char *const MODES[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};

/* `-c MODE`, as nvidia-smi of driver 580 prints it. */
static int set_mode(unsigned count, const char *only, const char *mode)
{
	static const char *const names[] = {"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"};
	for (unsigned i = 0; i < count; i++) {
		unsigned number = 0;
		struct pci pci = {0};
		if (!is_selected(i, only))
			continue;
		while (number < 4 && strcmp(mode, names[number]))
			number++;
		CALL(nvmlDeviceGetPciInfo_v3, (void *, struct pci *), handle(i), &pci);
		unsigned code = CALL(nvmlDeviceSetComputeMode, (void *, unsigned), handle(i), number);
		if (code) {
			printf("Unable to set the compute mode for GPU %s: %s\n", pci.text,
			       ((const char *(*)(unsigned))function("nvmlErrorString"))(code));
			return (int)code;
		}
		printf("Set compute mode to %s for GPU %s.\n", mode, pci.text);
	}
	puts("All done.");
	return 0;
}

/* One line for each GPU, with the fields that programs ask for. */
static int query(unsigned count, const char *only, char *fields, const char *format)
{
	if (!strstr(format, "noheader"))
		puts(fields);
	for (unsigned i = 0; i < count; i++) {
		if (!is_selected(i, only))
			continue;
		void *device = handle(i);
		char copy[256], text[96];
		const char *separator = "";
		struct memory memory = {0};
		if (!device)
			continue;
		snprintf(copy, sizeof copy, "%s", fields);
		for (char *field = strtok(copy, ","); field; field = strtok(NULL, ","), separator = ", ") {
			unsigned number = 0;
			if (!strcmp(field, "index")) {
				snprintf(text, sizeof text, "%u", i);
			} else if (!strcmp(field, "uuid")) {
				CALL(nvmlDeviceGetUUID, (void *, char *, unsigned), device, text, sizeof text);
			} else if (!strcmp(field, "name")) {
				CALL(nvmlDeviceGetName, (void *, char *, unsigned), device, text, sizeof text);
			} else if (!strcmp(field, "memory.total")) {
				CALL(nvmlDeviceGetMemoryInfo, (void *, struct memory *), device, &memory);
				snprintf(text, sizeof text, "%llu%s", memory.total >> 20, strstr(format, "nounits") ? "" : " MiB");
			} else if (!strcmp(field, "compute_mode")) {
				CALL(nvmlDeviceGetComputeMode, (void *, unsigned *), device, &number);
				snprintf(text, sizeof text, "%s", MODES[number % 4]);
			} else if (!strcmp(field, "driver_version")) {
				CALL(nvmlSystemGetDriverVersion, (char *, unsigned), text, sizeof text);
			} else if (!strcmp(field, "pci.bus_id")) {
				struct pci pci = {0};
				CALL(nvmlDeviceGetPciInfo_v3, (void *, struct pci *), device, &pci);
				snprintf(text, sizeof text, "%s", pci.text);
			} else if (!strcmp(field, "temperature.gpu")) {
				bool known = !CALL(nvmlDeviceGetTemperature, (void *, unsigned, unsigned *), device, 0, &number);
				known ? snprintf(text, sizeof text, "%u", number) : snprintf(text, sizeof text, "N/A");
			} else if (!strcmp(field, "power.draw")) {
				bool known = !CALL(nvmlDeviceGetPowerUsage, (void *, unsigned *), device, &number);
				const char *unit = strstr(format, "nounits") ? "" : " W";
				known ? snprintf(text, sizeof text, "%.2f%s", number / 1000.0, unit) : snprintf(text, sizeof text, "[N/A]");
			} else {
				printf("Field \"%s\" is not a valid field to query.\n", field);
				return 2;
			}
			printf("%s%s", separator, text);
		}
		puts("");
	}
	return 0;
}

/* One line for each process that computes, with its id. */
static int processes(unsigned count, const char *only)
{
	struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } list[64];
	for (unsigned i = 0; i < count; i++) {
		void *device = handle(i);
		unsigned found = sizeof list / sizeof *list;
		if (!is_selected(i, only) || !device || CALL(nvmlDeviceGetComputeRunningProcesses_v3, (void *, unsigned *, void *), device, &found, list))
			continue;
		for (unsigned j = 0; j < found; j++)
			printf("%u\n", list[j].pid);
	}
	return 0;
}

int main(int argc, char **argv)
{
	const char *only = argc > 3 && !strcmp(argv[1], "-i") ? argv[2] : NULL;
	if (only) {
		argc -= 2;
		argv += 2;
	}
	const char *mode = argc == 3 && !strcmp(argv[1], "-c") ? argv[2] : NULL;
	bool apps = argc == 3 && !strcmp(argv[1], "--query-compute-apps=pid");
	char *fields = argc == 3 && !strncmp(argv[1], "--query-gpu=", 12) ? argv[1] + 12 : NULL;
	if (argc > 1 && !fields && !apps && !mode && strcmp(argv[1], "-L") && strcmp(argv[1], "--list-gpus")) {
		puts("nvidia-smi of the fake driver\n\nusage: nvidia-smi [-i GPU] [-L | -c MODE | --query-gpu=FIELDS | --query-compute-apps=pid] [--format=csv[,noheader][,nounits]]");
		return strcmp(argv[1], "-h") && strcmp(argv[1], "--help");
	}
	nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (!nvml) {
		puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA "
		     "Display Driver is properly installed and present in your system.\n"
		     "Please also try adding directory that contains libnvidia-ml.so to your system PATH.");
		return 12;
	}
	unsigned count = 0, code = CALL(nvmlInit_v2, (void));
	if (!code)
		code = CALL(nvmlDeviceGetCount_v2, (unsigned *), &count);
	if (code)
		return (int)complain(code);
	if (!count) {
		puts("No devices were found");
		return 6;
	}
	for (unsigned i = 0; i < count; i++) {
		unsigned minor;
		void *device = handle(i);
		if (device && !CALL(nvmlDeviceGetMinorNumber, (void *, unsigned *), device, &minor))
			check_node(minor);
	}
	if (apps)
		return processes(count, only);
	if (fields)
		return query(count, only, fields, argv[2]);
	if (mode)
		return set_mode(count, only, mode);
	if (argc > 1)
		list(count);
	else
		table(count);
	CALL(nvmlShutdown, (void));
	return 0;
}
