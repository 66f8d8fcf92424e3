/* Runs a program for which some system calls fail, as on an old kernel or with the seccomp profile of an old engine.
 *
 * Usage: without-syscalls [--errno EPERM] NAME,NAME,... PROGRAM [ARGUMENT]...     (as root) */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static const struct { const char *name; int number; } CALLS[] = {
	{"openat2", SYS_openat2},	{"open_tree", SYS_open_tree},
	{"move_mount", SYS_move_mount}, {"mount_setattr", SYS_mount_setattr},
	{"fsopen", SYS_fsopen},		{"fsconfig", SYS_fsconfig},
	{"fsmount", SYS_fsmount},	{"close_range", SYS_close_range},
	{"clone3", SYS_clone3},		{"pidfd_open", SYS_pidfd_open},
	{"faccessat2", SYS_faccessat2}, {"statx", SYS_statx},
	{"connect", SYS_connect},	{"landlock_create_ruleset", 444},	/* newer than some headers, and the next */
	{"statmount", 457},		{"open_tree_attr", 467},
};
enum { COUNT = sizeof CALLS / sizeof *CALLS };

static int number_of(const char *name)
{
	for (int i = 0; i < COUNT; i++)
		if (strcmp(CALLS[i].name, name) == 0)
			return CALLS[i].number;
	fprintf(stderr, "without-syscalls: unknown call %s\n", name);
	exit(2);
}

int main(int argc, char **argv)
{
	int error = ENOSYS;
	if (argc > 2 && strcmp(argv[1], "--errno") == 0) {
		if (strcmp(argv[2], "EPERM") == 0)
			error = EPERM;
		argv += 2;
		argc -= 2;
	}
	if (argc < 3) {
		fprintf(stderr, "without-syscalls: too few arguments\n");
		return 2;
	}
	struct sock_filter filter[2 * COUNT + 2];
	unsigned short length = 0;
	filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (char *name = strtok(argv[1], ","); name && length + 3 < 2 * COUNT + 2; name = strtok(NULL, ",")) {
		unsigned number = (unsigned)number_of(name);
		filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1);
		filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error);
	}
	filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = {.len = length, .filter = filter};
	/* A user without privileges needs this to install a filter. The hook must also work with it. */
	if (geteuid() != 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
		perror("without-syscalls: no_new_privs");
		return 2;
	}
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) != 0) {
		perror("without-syscalls: seccomp");
		return 2;
	}
	execv(argv[2], argv + 2);
	perror(argv[2]);
	return 2;
}
