/* A management library that attacks the process that loads it. nvmlInit_v2 tries all attacks and fails; the error text
 * contains the results: 1 for an attack that succeeded. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static char outcome[160];

static int opens(const char *path, int flags)
{
	int fd = open(path, flags | O_CLOEXEC, 0644);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

/* The parent enforces the deadline, so a stopped parent has none. */
static int stops_parent(void)
{
	int stopped = kill(getppid(), SIGSTOP) == 0;
	if (stopped)
		kill(getppid(), SIGCONT);
	return stopped;
}

/* An orphaned process with the name in /marker. */
static int leaves_a_process(void)
{
	char name[16] = "";
	int fd = open("/marker", O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, name, sizeof name - 1) <= 0)
		return 0;
	close(fd);
	pid_t child = fork();
	if (child == 0) {
		setsid();
		if (fork() == 0) {
			prctl(PR_SET_PDEATHSIG, 0);
			prctl(PR_SET_NAME, name);
			/* The parent waits until every process has closed the pipe. */
			syscall(SYS_close_range, 0, ~0U, 0);
			sleep(600);
		}
		_exit(0);
	}
	sleep(1);
	return child > 0;
}

unsigned nvmlInit_v2(void)
{
	/* landlock_create_ruleset returns its version */
	long landlock = syscall(444, 0, 0, 1);
	int passwd = opens("/etc/passwd", O_WRONLY);
	int preload = opens("/etc/ld.so.preload", O_WRONLY | O_CREAT);
	int shared = opens("/shared", O_WRONLY);
	int stop = stops_parent();
	int left = leaves_a_process();
	snprintf(outcome, sizeof outcome, "passwd=%d preload=%d shared=%d stop=%d left=%d landlock=%ld", passwd, preload, shared,
		 stop, left, landlock);
	return 999;
}

const char *nvmlErrorString(unsigned code)
{
	(void)code;
	return outcome;
}
