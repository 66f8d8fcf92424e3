// SPDX-License-Identifier: Apache-2.0
/* The module nvidia provides the device. */
#include <linux/module.h>

static int __init start(void)
{
	return 0;
}

static void __exit stop(void)
{
}
module_init(start);
module_exit(stop);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("A fake of NVIDIA's kernel module for modes of screens");
MODULE_SOFTDEP("pre: nvidia");
