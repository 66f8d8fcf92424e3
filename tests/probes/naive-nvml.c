/* naive-nvml ROOT LIBRARY: asks NVML in a child that has dropped its capabilities but still has uid 0. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <grp.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char **words)
{
	if (count != 3)
		return 2;
	pid_t child = fork();
	if (child > 0) {
		int status;
		while (waitpid(child, &status, 0) < 0)
			;
		return status != 0;
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (chroot(words[1]) || chdir("/") || setgroups(0, NULL))
		return 1;
	for (int cap = 0; cap <= 63; cap++)
		prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[2] = {{0}};
	if (syscall(SYS_capset, &header, none))
		return 1;
	void *library = dlopen(words[2], RTLD_NOW);
	unsigned (*init)(void) = library ? (unsigned (*)(void))dlsym(library, "nvmlInit_v2") : NULL;
	const char *(*text)(unsigned) = library ? (const char *(*)(unsigned))dlsym(library, "nvmlErrorString") : NULL;
	if (!init || !text)
		return 1;
	puts(text(init()));
	fflush(stdout);
	_exit(0);
}
