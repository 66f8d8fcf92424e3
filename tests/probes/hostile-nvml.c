/* A management library that attacks the process that loads it. nvmlInit_v2 tries all attacks and fails; the error text
 * contains the user and the group of the process, whether it can use the driver's node, and the results: 1 for an attack that
 * succeeded. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/netlink.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

static char outcome[1024];

static int opens(const char *path, int flags)
{
	int fd = open(path, flags | O_CLOEXEC, 0644);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

/* The nodes of the fake driver have a number without a device. */
static int uses(const char *node)
{
	return opens(node, O_RDWR) || errno == ENXIO;
}

static int connects(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	strncpy(address.sun_path, path, sizeof address.sun_path - 1);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int connected = fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0;
	if (fd >= 0)
		close(fd);
	return connected;
}

static int has_socket(int family, int type)
{
	int fd = socket(family, type | SOCK_CLOEXEC, 0);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

/* Whether a child of this process can do it, so that this process stays as it is. */
static int child_can(int (*attack)(void))
{
	int status = 0;
	pid_t child = fork();
	if (child == 0)
		_exit(attack() ? 0 : 1);
	return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static int is_traced(void)
{
	return ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0;
}

static int mounts(void)
{
	return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 || mount("none", "/run", "tmpfs", 0, NULL) == 0;
}

static int loads_bpf(void)
{
	union bpf_attr map = {.map_type = BPF_MAP_TYPE_ARRAY, .key_size = 4, .value_size = 4, .max_entries = 1};
	return syscall(SYS_bpf, BPF_MAP_CREATE, &map, sizeof map) >= 0;
}

static int shares_memory(void)
{
	int id = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
	if (id >= 0)
		shmctl(id, IPC_RMID, NULL);
	return id >= 0;
}

/* The parent enforces the deadline, so a stopped parent has none. */
static int stops_parent(void)
{
	int stopped = kill(getppid(), SIGSTOP) == 0;
	if (stopped)
		kill(getppid(), SIGCONT);
	return stopped;
}

/* An orphaned process with the name in /usr/marker. */
static int leaves_a_process(void)
{
	char name[16] = "";
	int fd = open("/usr/marker", O_RDONLY | O_CLOEXEC);
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

static void note(const char *name, long result)
{
	size_t used = strlen(outcome);
	snprintf(outcome + used, sizeof outcome - used, "%s%s=%ld", used ? " " : "", name, result);
}

unsigned nvmlInit_v2(void)
{
	note("uid", getuid());
	note("gid", getgid());
	note("ctl", uses("/dev/nvidiactl"));
	note("left", leaves_a_process());
	/* landlock_create_ruleset returns its version */
	note("landlock", syscall(444, 0, 0, 1));
	note("passwd", opens("/etc/passwd", O_WRONLY));
	note("preload", opens("/etc/ld.so.preload", O_WRONLY | O_CREAT));
	note("shared", opens("/shared", O_WRONLY));
	note("shm", opens("/dev/shm/root", O_RDWR));
	note("shadow", opens("/etc/shadow", O_RDONLY));
	note("kmsg", opens("/dev/kmsg", O_WRONLY));
	note("device", opens("/dev/root", O_RDWR));
	note("read-device", opens("/dev/root", O_RDONLY));
	note("mode", chmod("/etc/shadow", 0777) == 0);
	note("node-mode", chmod("/dev/nvidiactl", 0777) == 0);
	note("times", utimensat(AT_FDCWD, "/etc/shadow", NULL, 0) == 0);
	note("attribute", setxattr("/etc/shadow", "user.hostile", "1", 1, 0) == 0);
	note("socket", connects("/run/root.sock"));
	note("inet", has_socket(AF_INET, SOCK_STREAM));
	note("netlink", has_socket(AF_NETLINK, SOCK_RAW));
	note("stop", stops_parent());
	note("ptrace", child_can(is_traced));
	note("mount", child_can(mounts));
	note("bpf", child_can(loads_bpf));
	note("ipc", shares_memory());
	return 999;
}

const char *nvmlErrorString(unsigned code)
{
	(void)code;
	return outcome;
}
