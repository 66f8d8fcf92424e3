// SPDX-License-Identifier: Apache-2.0
/* A character device with its own major number, like NVIDIA's module for unified memory. It is not loaded automatically. */
#include <linux/fs.h>
#include <linux/module.h>

static int major;

static int open_node(struct inode *inode, struct file *file)
{
	return iminor(inode) < 2 ? 0 : -ENXIO;
}

static const struct file_operations fops = { .owner = THIS_MODULE, .open = open_node };

static int __init start(void)
{
	major = register_chrdev(0, "nvidia-uvm", &fops);
	return major < 0 ? major : 0;
}

static void __exit stop(void)
{
	unregister_chrdev(major, "nvidia-uvm");
}
module_init(start);
module_exit(stop);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("A fake of NVIDIA's kernel module for unified memory");
MODULE_SOFTDEP("pre: nvidia");
