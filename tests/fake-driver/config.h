/* The fake driver's configuration: which GPUs there are and how they misbehave. */
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
	unsigned fail;        /* what every call about it returns, but the one for its handle */
	unsigned fail_handle; /* what that one returns */
	bool hang_handle;     /* it never returns */
	bool crash_handle;    /* it ends the process */
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
	bool count_all; /* count GPUs whose node cannot be opened, too */
	unsigned not_supported_count;
	char not_supported[MAX_QUIRKS][64];
	unsigned gpu_count;
	struct gpu gpu[MAX_GPUS];
};

/* Reads the configuration that goes with the library file at `library`: `nvml.conf` beside it, or what follows the
 * last line `#fake-driver` in the file itself. False if there is neither, or a line is wrong. */
bool config_read(const char *library, struct config *config);

#endif
