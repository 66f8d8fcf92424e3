// SPDX-License-Identifier: Apache-2.0
/* The user-space interface of NVIDIA's kernel module, for the cards of fake_gpus.c: it binds to them, has the character
 * devices of major 195, and reports in /proc/driver/nvidia. Like the real module, it creates no device nodes. */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#define VERSION "535.183.01"

enum { MAJOR_NUMBER = 195, CTL_MINOR = 255, MODESET_MINOR = 254, MOST = 8 };

static unsigned int NVreg_DeviceFileUID;
static unsigned int NVreg_DeviceFileGID;
static unsigned int NVreg_DeviceFileMode = 0666;
static unsigned int NVreg_ModifyDeviceFiles = 1;
module_param(NVreg_DeviceFileUID, uint, 0444);
module_param(NVreg_DeviceFileGID, uint, 0444);
module_param(NVreg_DeviceFileMode, uint, 0444);
module_param(NVreg_ModifyDeviceFiles, uint, 0444);

struct gpu {
	struct pci_dev *dev;
	struct proc_dir_entry *dir;
};

static struct gpu gpus[MOST];
static struct proc_dir_entry *top, *top_gpus;
static int caps_major;

static int open_node(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);

	if (minor == CTL_MINOR || minor == MODESET_MINOR || (minor < MOST && gpus[minor].dev))
		return 0;
	return -ENODEV;
}

static int open_cap(struct inode *inode, struct file *file)
{
	return 0;
}

static const struct file_operations fops = { .owner = THIS_MODULE, .open = open_node };
static const struct file_operations caps_fops = { .owner = THIS_MODULE, .open = open_cap };

static int show_version(struct seq_file *file, void *data)
{
	seq_printf(file, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  %s  Sun May 12 19:39:15 UTC 2024\n", VERSION);
	seq_puts(file, "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n");
	return 0;
}

static int show_params(struct seq_file *file, void *data)
{
	seq_printf(file, "ResmanDebugLevel: 4294967295\nRmLogonRC: 1\nModifyDeviceFiles: %u\n", NVreg_ModifyDeviceFiles);
	seq_printf(file, "DeviceFileUID: %u\nDeviceFileGID: %u\n", NVreg_DeviceFileUID, NVreg_DeviceFileGID);
	seq_printf(file, "DeviceFileMode: %u\nInitializeSystemMemoryAllocations: 1\n", NVreg_DeviceFileMode);
	return 0;
}

static int show_registry(struct seq_file *file, void *data)
{
	return 0;
}

static int show_information(struct seq_file *file, void *data)
{
	unsigned int n = (struct gpu *)file->private - gpus;

	seq_printf(file, "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t %u\n", 64 + n);
	seq_printf(file, "GPU UUID: \t GPU-%08x-%04x-%04x-%04x-%012x\n", 0x51eed000 + n, n, 0x4000 + n, 0x8000, 0xfa4e0000 + n);
	seq_puts(file, "Video BIOS: \t 96.00.74.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n");
	seq_printf(file, "Bus Location: \t %s\nDevice Minor: \t %u\n", pci_name(gpus[n].dev), n);
	seq_printf(file, "GPU Firmware: \t %s\nGPU Excluded:\t No\n", VERSION);
	return 0;
}

/* The minor number is the position of the card, so a card that is added again has the same number. */
static int probe(struct pci_dev *dev, const struct pci_device_id *id)
{
	int n = dev->bus->number - 1;

	if (n < 0 || n >= MOST)
		return -ENODEV;
	gpus[n].dev = dev;
	gpus[n].dir = proc_mkdir(pci_name(dev), top_gpus);
	if (gpus[n].dir)
		proc_create_single_data("information", 0444, gpus[n].dir, show_information, &gpus[n]);
	pci_set_drvdata(dev, &gpus[n]);
	return 0;
}

static void remove(struct pci_dev *dev)
{
	struct gpu *gpu = pci_get_drvdata(dev);

	proc_remove(gpu->dir);
	*gpu = (struct gpu){};
}

static const struct pci_device_id ids[] = {
	{ PCI_DEVICE(0x10de, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_VGA << 8, .class_mask = ~0 },
	{ PCI_DEVICE(0x10de, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_3D << 8, .class_mask = ~0 },
	{}
};
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver driver = { .name = "nvidia", .id_table = ids, .probe = probe, .remove = remove };

static int __init start(void)
{
	int error = register_chrdev(MAJOR_NUMBER, "nvidia", &fops);

	if (error < 0)
		return error;
	caps_major = register_chrdev(0, "nvidia-caps", &caps_fops);
	top = proc_mkdir("driver/nvidia", NULL);
	top_gpus = top ? proc_mkdir("gpus", top) : NULL;
	if (top_gpus) {
		proc_create_single("version", 0444, top, show_version);
		proc_create_single("params", 0444, top, show_params);
		proc_create_single("registry", 0444, top, show_registry);
	}
	error = pci_register_driver(&driver);
	if (error) {
		proc_remove(top);
		unregister_chrdev(caps_major, "nvidia-caps");
		unregister_chrdev(MAJOR_NUMBER, "nvidia");
	}
	return error;
}

static void __exit stop(void)
{
	pci_unregister_driver(&driver);
	proc_remove(top);
	unregister_chrdev(caps_major, "nvidia-caps");
	unregister_chrdev(MAJOR_NUMBER, "nvidia");
}
module_init(start);
module_exit(stop);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("A fake of NVIDIA's kernel module");
MODULE_VERSION(VERSION);
MODULE_ALIAS_CHARDEV_MAJOR(195);
