/* The fake driver's configuration: the GPUs and their faults. */
#ifndef FAKE_DRIVER_CONFIG_H
#define FAKE_DRIVER_CONFIG_H

#include <stdbool.h>

enum { MAX_GPUS = 16, MAX_MIG = 8, MAX_QUIRKS = 16 };

struct mig {
	unsigned gi, ci;
	unsigned cap_gi, cap_ci; /* minors below /dev/nvidia-caps that open it; 0: nothing needed */
	char uuid[96];
};

struct gpu {
	unsigned minor;
	char uuid[96];
	unsigned domain, bus, device;
	char name[96];
	int cc_major, cc_minor;
	unsigned brand;
	unsigned long long memory_mib;
	unsigned fail;        /* the result of every call for this GPU, except for the one that returns its handle */
	unsigned fail_handle; /* the result of the call that returns its handle */
	bool hang_handle;     /* that call never returns */
	bool crash_handle;    /* that call ends the process */
	bool mig_enabled;
	unsigned mig_count;
	struct mig mig[MAX_MIG];
};

struct config {
	char driver[80];
	int cuda; /* 12020 is 12.2 */
	unsigned init_delay_ms;
	bool init_hang;
	bool init_crash;
	unsigned init_error;
	bool count_all; /* also count GPUs whose node cannot be opened */
	unsigned not_supported_count;
	char not_supported[MAX_QUIRKS][64];
	unsigned gpu_count;
	struct gpu gpu[MAX_GPUS];
};

/* Reads the configuration of the library file at `library`: `nvml.conf` next to it, or the text after the last line
 * `#fake-driver` in the file itself. Returns false if both are missing, or a line is invalid. */
bool config_read(const char *library, struct config *config);

#endif
