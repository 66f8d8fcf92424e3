/* The fake driver's configuration: which GPUs there are and how they misbehave. It is read again when its file has changed; only
 * the number of GPUs stays that of nvmlInit. The lines of nvml.conf:
 *
 *   driver VERSION            cuda X.Y                   count-all
 *   init-delay-ms N           init-error CODE            init-hang        init-crash
 *   not-supported CALL        wsl (the library of WSL 2)
 *   mps-fault (the server of the MPS daemon has the status FAULT)               mps-server-fails
 *   mps-single-user (a driver without the option -M)
 *   gpu uuid=... bus=... name="..." cc=9.0 KEY... [mig]
 *   missing CALL
 *   process gpu=INDEX pid=N [memory=MiB] [kind=compute|graphics|mps]
 *   mig gpu=INDEX gi=N ci=N cap-gi=MINOR cap-ci=MINOR profile=1g.10gb uuid=...
 *
 * Keys of a GPU: minor, brand, memory (MiB), memory-used (MiB, also of a MIG device), numa, nvlinks=INDEX:COUNT,... (INDEX 16: a
 * switch), fail=CODE (of each call about it but the one for its handle), fail-handle=CODE, hang=CALL, crash=CALL, events=MASK, and
 * memory-reserved (MiB of memory-used, also of a MIG device), nvlink-sent and nvlink-received (KiB), clock-reasons (bits), remap-pending,
 * util, mem-util, encoder and decoder (percent), temperature and mem-temperature (degrees Celsius), power (milliwatts), sm-clock and
 * mem-clock (MHz), energy (millijoules), pcie-replays, remapped-cor, remapped-unc, recovery-action, remap-failure, power-limit, ecc-corrected, ecc and addressing
 * (0, 1 or 2), which can be `none`. */
#ifndef FAKE_DRIVER_CONFIG_H
#define FAKE_DRIVER_CONFIG_H

#include <stdbool.h>

enum { MAX_GPUS = 16, MAX_MIG = 8, MAX_QUIRKS = 16, MAX_PROCESSES = 64, MAX_LINKS = 18, NO_NUMA = -1, UNSUPPORTED = -1 };

struct mig {
	unsigned gi, ci;
	unsigned cap_gi, cap_ci; /* minors below /dev/nvidia-caps that open it; 0: nothing needed */
	unsigned long long memory_used_mib, memory_reserved_mib;
	char uuid[96];
	char profile[32]; /* 1g.10gb; may be empty */
};

struct gpu {
	unsigned minor;
	char uuid[96];
	unsigned domain, bus, device;
	char name[96];
	int cc_major, cc_minor;
	unsigned brand;
	unsigned long long memory_mib, memory_used_mib, memory_reserved_mib;
	unsigned fail;        /* what every call about it returns, but the one for its handle */
	unsigned fail_handle; /* what that one returns */
	char hang[64];        /* the call about it that does not return, while this stands here */
	char crash[64];       /* the call about it that ends the process */
	int recovery_action;  /* field 230, or UNSUPPORTED */
	int remap_failure;    /* field 145, or UNSUPPORTED */
	long long ecc;        /* uncorrectable errors, or UNSUPPORTED */
	int util;             /* percent, or UNSUPPORTED */
	int temperature;      /* degrees Celsius, or UNSUPPORTED */
	int power;            /* milliwatts, or UNSUPPORTED */
	int mem_util, encoder, decoder; /* percent, or UNSUPPORTED */
	int mem_temperature;  /* degrees Celsius, or UNSUPPORTED */
	int sm_clock, mem_clock; /* MHz, or UNSUPPORTED */
	long long energy;     /* millijoules, or UNSUPPORTED */
	int pcie_replays;     /* or UNSUPPORTED */
	int remapped_cor, remapped_unc; /* rows, or UNSUPPORTED */
	int power_limit;      /* milliwatts, or UNSUPPORTED */
	long long ecc_corrected; /* errors, or UNSUPPORTED */
	int remap_pending;    /* field 144, or UNSUPPORTED */
	int clock_reasons;    /* bits, or UNSUPPORTED */
	long long nvlink_sent, nvlink_received; /* KiB through all links, if there are any */
	unsigned events;      /* the types of events that it supports */
	int numa;             /* the NUMA node, or NO_NUMA */
	int addressing;       /* 0, 1 for HMM, 2 for ATS, or UNSUPPORTED */
	int links[MAX_LINKS]; /* the index of the GPU at the other end of each NVLink, or -1; MAX_GPUS is a switch */
	bool mig_enabled;
	unsigned mig_count;
	struct mig mig[MAX_MIG];
};

struct process {
	unsigned gpu, pid;
	long long memory_mib; /* or UNSUPPORTED */
	char kind[16];
};

struct config {
	char driver[80];
	int cuda; /* 12020 is 12.2 */
	unsigned init_delay_ms;
	bool init_hang;
	bool init_crash;
	unsigned init_error;
	bool wsl;
	bool mps_fault, mps_server_fails, mps_single_user;
	bool count_all; /* count GPUs whose node cannot be opened, too */
	unsigned not_supported_count;
	char not_supported[MAX_QUIRKS][64];
	unsigned missing_count;
	char missing[MAX_QUIRKS][64]; /* functions that the library does not have */
	unsigned process_count;
	struct process process[MAX_PROCESSES];
	unsigned gpu_count;
	struct gpu gpu[MAX_GPUS];
};

/* Reads the configuration that goes with the library file at `library`: `nvml.conf` beside it, or what follows the
 * last line `#fake-driver` in the file itself. False if there is neither, or a line is wrong. */
bool config_read(const char *library, struct config *config);

/* Reads a line `process`. False if it has no process id. */
bool config_process(const char *line, struct process *process);

/* The path of a file beside the library. False if the library is not found. */
bool config_beside(const char *library, const char *name, char *out, unsigned size);

#endif
