/* A fake nvidia-cuda-mps-control: the options, the daemon's start, and the user interface. */
#define _GNU_SOURCE
#include "mps_daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct daemon mps;

static const char HELP[] =
	"CUDA MPS Control for Linux/Unix/QNX, of the fake driver.\n\n"
	"nvidia-cuda-mps-control [options] [command]\n"
	"OPTIONS:\n"
	"  -h,--help                Print this message\n"
	"  -d,--daemon              Setup the daemon in the background\n"
	"  -f,--forground           Setup the daemon in the foreground\n";
static const char HELP_MULTI_USER[] = "  -M,--multiuser-server    Enable multi-user mode\n";

/* As the real one, it accepts a long option with one hyphen, too. */
static bool is_option(const char *word, const char *letter, const char *name)
{
	return !strcmp(word, letter) || !strcmp(word, name) || !strcmp(word, name + 1);
}

static bool has_multi_user(void)
{
	const struct config *config = mps_config();
	return !config || !config->mps_single_user;
}

static int open_log(const char *name)
{
	const char *directory = getenv("CUDA_MPS_LOG_DIRECTORY");
	char path[4096];
	if (!directory || !*directory)
		directory = "/var/log/nvidia-mps";
	mkdir(directory, 0755);
	snprintf(path, sizeof path, "%s/%s", directory, name);
	int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
	/* Not a number that the server uses. */
	int high = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 10);
	close(fd);
	return high;
}

/* Holds a lock on `control_lock` until the process ends. */
static bool lock(void)
{
	char path[4096];
	if (mkdir(mps_pipe_directory(), 0755) && errno != EEXIST)
		return false;
	mps_pipe_path("control_lock", path, sizeof path);
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	if (fd < 0)
		return false;
	if (flock(fd, LOCK_EX | LOCK_NB)) {
		fputs("An instance of this daemon is already running\n", stderr);
		exit(1);
	}
	fchmod(fd, 0666);
	return true;
}

static bool write_files(void)
{
	char path[4096];
	mps_pipe_path("log", path, sizeof path);
	unlink(path);
	if (mkfifo(path, 0777) || chmod(path, 0777))
		return false;
	mps_pipe_path("nvidia-cuda-mps-control.pid", path, sizeof path);
	FILE *file = fopen(path, "we");
	if (!file)
		return false;
	fprintf(file, "%d", getpid());
	return !fclose(file) && !chmod(path, 0666);
}

/* Returns only in the process that becomes the daemon. The others end when it can be reached. */
static void to_background(int ready[2])
{
	char byte;
	for (unsigned generation = 0; generation < 2; generation++) {
		pid_t child = fork();
		if (child < 0)
			exit(1);
		if (child) {
			close(ready[1]);
			exit(read(ready[0], &byte, 1) == 1 ? 0 : 1);
		}
		setsid();
	}
	int null = open("/dev/null", O_RDWR);
	for (int fd = 0; fd < 3; fd++)
		dup2(null, fd);
	close(null);
}

static int serve(bool background)
{
	int ready[2];
	if (!lock()) {
		fprintf(stderr, "Cannot create the pipe directory %s: %s\n", mps_pipe_directory(), strerror(errno));
		return 1;
	}
	mps.control_log = open_log("control.log");
	mps.server_log = open_log("server.log");
	/* The variable for the memory limit has no effect on the daemon. */
	const char *percentage = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
	mps.defaults.percentage = percentage ? atof(percentage) : 100;
	if (mps.defaults.percentage <= 0 || mps.defaults.percentage > 100)
		mps.defaults.percentage = 100;
	mps.quitter = -1;
	if (pipe2(ready, O_CLOEXEC))
		return 1;
	if (background)
		to_background(ready);
	umask(0);
	if (!write_files())
		return 1;
	return daemon_run(ready[1]);
}

/* Sends a command, and prints the answer. Returns the exit status: 0 even after an error of the command. */
static int send_command(const char *command)
{
	char text[MPS_MESSAGE];
	int daemon = mps_connect();
	if (daemon < 0) {
		fputs("Cannot find MPS control daemon process\n", stderr);
		return 1;
	}
	mps_send(daemon, -1, "ui %s", command);
	while (mps_receive(daemon, 0, text, sizeof text, NULL) > 0)
		fputs(text, stdout);
	fflush(stdout);
	close(daemon);
	return 0;
}

static int send_input(void)
{
	char line[1024];
	int status = 0;
	while (!status && fgets(line, sizeof line, stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (*line)
			status = send_command(line);
	}
	return status;
}

int main(int argc, char **argv)
{
	bool background = false, foreground = false;
	char command[1024] = "";
	for (int i = 1; i < argc; i++) {
		if (is_option(argv[i], "-h", "--help")) {
			fputs(HELP, stdout);
			if (has_multi_user())
				fputs(HELP_MULTI_USER, stdout);
			return 0;
		}
		if (is_option(argv[i], "-v", "--version")) {
			puts("CUDA MPS Control for Linux/Unix/QNX. Binary version: 13000");
			return 0;
		}
		if (is_option(argv[i], "-d", "--daemon")) {
			background = true;
		} else if (is_option(argv[i], "-f", "--forground")) {
			foreground = true;
		} else if (is_option(argv[i], "-M", "--multiuser-server") && has_multi_user()) {
			mps.multi_user = true;
		} else if (*argv[i] == '-' && !*command) {
			fprintf(stderr, "Unknown option %s\n%s", argv[i], HELP);
			return 1;
		} else {
			size_t used = strlen(command);
			snprintf(command + used, sizeof command - used, "%s%s", used ? " " : "", argv[i]);
		}
	}
	if (background || foreground)
		return serve(background);
	return *command ? send_command(command) : send_input();
}
