/*
 * A process with another name and other arguments, which end in gigabytes that cost it nothing, and its child. prctl(2) with
 * PR_SET_MM_MAP needs no privilege. Prints the number of the child.
 *
 * Usage: pretends NAME MEGABYTES ARGUMENT...
 */
#include <fcntl.h>
#include <linux/prctl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

// Field `number` of proc_pid_stat(5), counted from 1.
static unsigned long field(const char *stat, int number)
{
	const char *at = strrchr(stat, ')');
	for (int n = 2; at && n < number; n++)
		at = strchr(at + 1, ' ');
	return at ? strtoul(at + 1, NULL, 10) : 0;
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	char stat[4096] = {0};
	int fd = open("/proc/self/stat", O_RDONLY);
	if (fd < 0 || read(fd, stat, sizeof stat - 1) <= 0)
		return 3;
	size_t size = strtoul(argv[2], NULL, 10) << 20;
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		return 4;
	char *end = memory;
	for (int i = 3; i < argc; i++)
		end = stpcpy(end, argv[i]) + 1;
	struct prctl_mm_map map = {
		.start_code = field(stat, 26), .end_code = field(stat, 27), .start_data = field(stat, 45), .end_data = field(stat, 46),
		.start_brk = field(stat, 47), .brk = (unsigned long)sbrk(0), .start_stack = field(stat, 28),
		.arg_start = (unsigned long)memory, .arg_end = (unsigned long)memory + size,
		.env_start = field(stat, 50), .env_end = field(stat, 51), .exe_fd = -1,
	};
	if (prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0) || prctl(PR_SET_NAME, argv[1]))
		return 5;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	pid_t child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	} else {
		printf("%d\n", child);
		fflush(stdout);
	}
	for (;;)
		pause();
}
