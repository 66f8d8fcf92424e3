/* What the parts of the fake MPS share. */
#define _GNU_SOURCE
#include "mps.h"

#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

const char *mps_pipe_directory(void)
{
	const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
	return directory && *directory ? directory : "/tmp/nvidia-mps";
}

bool mps_pipe_path(const char *name, char *out, size_t size)
{
	int length = snprintf(out, size, "%s/%s", mps_pipe_directory(), name);
	return length > 0 && (size_t)length < size;
}

bool mps_address(const char *name, struct sockaddr_un *out)
{
	out->sun_family = AF_UNIX;
	return mps_pipe_path(name, out->sun_path, sizeof out->sun_path);
}

int mps_connect(void)
{
	struct sockaddr_un address;
	if (!mps_address("control", &address))
		return -1;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address)) {
		close(fd);
		return -1;
	}
	return fd;
}

bool mps_send(int socket, int fd, const char *format, ...)
{
	char text[MPS_MESSAGE];
	va_list values;
	va_start(values, format);
	int length = vsnprintf(text, sizeof text, format, values);
	va_end(values);
	if (length < 0)
		return false;
	if ((size_t)length >= sizeof text)
		length = sizeof text - 1;
	union {
		char space[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct iovec part = {.iov_base = text, .iov_len = (size_t)length};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
	if (fd >= 0) {
		message.msg_control = control.space;
		message.msg_controllen = sizeof control.space;
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof fd);
		memcpy(CMSG_DATA(header), &fd, sizeof fd);
	}
	return sendmsg(socket, &message, MSG_NOSIGNAL) == length;
}

ssize_t mps_receive(int socket, int flags, char *text, size_t size, int *fd)
{
	union {
		char space[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct iovec part = {.iov_base = text, .iov_len = size - 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
	if (fd) {
		*fd = -1;
		message.msg_control = control.space;
		message.msg_controllen = sizeof control.space;
	}
	ssize_t length;
	do
		length = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
	while (length < 0 && errno == EINTR);
	text[length > 0 ? length : 0] = 0;
	struct cmsghdr *header = length > 0 && fd ? CMSG_FIRSTHDR(&message) : NULL;
	if (header && header->cmsg_type == SCM_RIGHTS)
		memcpy(fd, CMSG_DATA(header), sizeof *fd);
	return length;
}

void mps_log(int log, const char *who, const char *format, ...)
{
	char text[1024], line[1200], now[32];
	struct timespec clock;
	va_list values;
	va_start(values, format);
	vsnprintf(text, sizeof text, format, values);
	va_end(values);
	clock_gettime(CLOCK_REALTIME, &clock);
	strftime(now, sizeof now, "%Y-%m-%d %H:%M:%S", localtime(&clock.tv_sec));
	int length = snprintf(line, sizeof line, "[%s.%03ld %s %5d] %s\n", now, clock.tv_nsec / 1000000, who, getpid(), text);
	int outputs[] = {log, STDOUT_FILENO};
	for (unsigned i = 0; i < 2; i++)
		if (outputs[i] >= 0 && write(outputs[i], line, (size_t)length) < 0)
			continue; /* A full disk, or a closed pipe, ends no daemon. */
}

/* Finds nvml.conf: next to the libraries, below the directory that has this program in its `bin`. */
static bool config_path(char *out, size_t size)
{
	char program[PATH_MAX];
	struct utsname machine;
	ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
	if (length < 0 || uname(&machine))
		return false;
	program[length] = 0;
	const char *prefix = dirname(dirname(program));
	snprintf(out, size, "%s/lib/%s-linux-gnu/nvml.conf", prefix, machine.machine);
	if (access(out, R_OK))
		snprintf(out, size, "%s/lib64/nvml.conf", prefix);
	return !access(out, R_OK);
}

const struct config *mps_config(void)
{
	static struct config config;
	char path[PATH_MAX + 64];
	/* A file that is being written is read again. */
	for (unsigned attempt = 0; attempt < 20 && config_path(path, sizeof path); attempt++) {
		if (config_read(path, &config))
			return &config;
		usleep(10000);
	}
	return NULL;
}

void mps_write_processes(unsigned index, const char *text, size_t length)
{
	char path[PATH_MAX + 64], list[PATH_MAX + 128], fresh[PATH_MAX + 160];
	if (!config_path(path, sizeof path))
		return;
	snprintf(list, sizeof list, "%s/nvml.processes-%u", dirname(path), index);
	snprintf(fresh, sizeof fresh, "%s.new", list);
	/* Only root can write there. */
	FILE *file = fopen(fresh, "we");
	if (!file)
		return;
	fwrite(text, 1, length, file);
	if (!fclose(file) && rename(fresh, list))
		unlink(fresh);
}

const struct gpu *mps_gpu(const struct config *config, unsigned *index)
{
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");
	char first[96] = "0";
	if (visible)
		snprintf(first, sizeof first, "%.*s", (int)strcspn(visible, ","), visible);
	for (unsigned i = 0; i < config->gpu_count; i++) {
		char number[16];
		snprintf(number, sizeof number, "%u", i);
		if (strcmp(first, number) && strcmp(first, config->gpu[i].uuid))
			continue;
		*index = i;
		return &config->gpu[i];
	}
	return NULL;
}

unsigned mps_parse_memory(const char *text)
{
	char *unit;
	unsigned long number = strtoul(text, &unit, 10);
	if (unit == text)
		return 0;
	if (*unit == 'G' || *unit == 'g')
		return (unsigned)number * 1024;
	return *unit == 'M' || *unit == 'm' ? (unsigned)number : 0;
}
