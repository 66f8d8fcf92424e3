// SPDX-License-Identifier: Apache-2.0
/* The hardware: PCI buses with one GPU each, which responds only to reads of its configuration space. The GPUs appear
 * when this module is loaded, and disappear when it is unloaded or when they are removed with sysfs. */
#include <linux/module.h>
#include <linux/pci.h>

enum { FIRST_BUS = 1, MOST = 8 };

static int gpus = 2;
module_param(gpus, int, 0444);

static struct pci_sysdata sysdata = { .domain = 0, .node = NUMA_NO_NODE };
static struct pci_bus *buses[MOST];

static u32 config_word(int where)
{
	switch (where & ~3) {
	case PCI_VENDOR_ID: return 0x233010de; // an NVIDIA H100
	case PCI_CLASS_REVISION: return 0x030200a1; // a 3D controller
	case PCI_SUBSYSTEM_VENDOR_ID: return 0x16c110de;
	default: return 0;
	}
}

static int read_config(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	if (devfn != 0) {
		*value = ~0;
		return PCIBIOS_DEVICE_NOT_FOUND;
	}
	*value = config_word(where) >> (8 * (where & 3));
	if (size < 4)
		*value &= (1U << (8 * size)) - 1;
	return PCIBIOS_SUCCESSFUL;
}

static int write_config(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops ops = { .read = read_config, .write = write_config };

static void remove_buses(void)
{
	pci_lock_rescan_remove();
	for (int n = 0; n < MOST; n++) {
		if (!buses[n])
			continue;
		pci_stop_root_bus(buses[n]);
		pci_remove_root_bus(buses[n]);
	}
	pci_unlock_rescan_remove();
}

static int __init start(void)
{
	if (gpus < 0 || gpus > MOST)
		return -EINVAL;
	for (int n = 0; n < gpus; n++) {
		LIST_HEAD(resources);

		pci_lock_rescan_remove();
		buses[n] = pci_scan_root_bus(NULL, FIRST_BUS + n, &ops, &sysdata, &resources);
		if (buses[n])
			pci_bus_add_devices(buses[n]);
		pci_unlock_rescan_remove();
		if (!buses[n]) {
			remove_buses();
			return -ENODEV;
		}
	}
	return 0;
}
module_init(start);
module_exit(remove_buses);
MODULE_LICENSE("GPL"); // the functions that this module calls are reserved for GPL modules
MODULE_DESCRIPTION("PCI buses with fake GPUs");
