/* A fake nvidia-cuda-mps-server: has the context of a GPU, and the connections of the clients. It uses no GPU. */
#define _GNU_SOURCE
#include "compute_mode.h"
#include "mps.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* For compute capability 7.0 and newer; the daemon counts more, because some wait. */
enum { MAX_CONNECTED = 48, CUDA_ERROR_MPS_SERVER_NOT_READY = 807, CUDA_ERROR_MPS_MAX_CLIENTS_REACHED = 808 };

struct connection {
	int fd, pid;
};

static struct connection clients[MAX_CONNECTED];
static unsigned client_count;
static struct limits limits;
static unsigned minor;
static char uuid[96];
static bool ending, has_fault;

#define LOG(...) mps_log(MPS_SERVER_LOG, "Server", __VA_ARGS__)

static _Noreturn void fail(const char *why)
{
	LOG("%s", why);
	exit(1);
}

/* As in nvml.c: ENXIO comes after all permission checks. */
static bool opens(const char *path)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd >= 0)
		close(fd);
	return fd >= 0 || errno == ENXIO || errno == ENODEV;
}

/* Creates the context of the GPU: like any program, the server needs libcuda, the nodes, and a compute mode that permits it. */
static void create_context(void)
{
	char node[32];
	Dl_info found;
	unsigned index;
	void *libcuda = dlopen("libcuda.so.1", RTLD_NOW);
	if (!libcuda || !dladdr(dlsym(libcuda, "cuInit"), &found))
		fail("Failed to load libcuda.so.1");
	const struct config *config = mps_config();
	const struct gpu *gpu = config ? mps_gpu(config, &index) : NULL;
	if (!gpu || gpu->mig_enabled || gpu->fail || config->init_error || config->mps_server_fails)
		fail("Failed to initialize the driver: no usable device");
	minor = gpu->minor;
	snprintf(uuid, sizeof uuid, "%s", gpu->uuid);
	snprintf(node, sizeof node, "/dev/nvidia%u", minor);
	if (!opens("/dev/nvidiactl") || !opens("/dev/nvidia-uvm") || !opens(node))
		fail("Failed to open the device nodes");
	LOG("Creating server context on device 0 (%s)", gpu->name);
	unsigned mode = compute_mode(found.dli_fname, index);
	/* NVIDIA documents that no context can be created then. */
	if (mode == COMPUTE_PROHIBITED)
		fail("Failed to create the context: the compute mode of the device is prohibited");
	if (!gpu_use(found.dli_fname, index, mode == COMPUTE_EXCLUSIVE_PROCESS))
		fail("Failed to create the context: the device is used by another process");
	LOG("CUDA MPS Server for Linux/Unix. Binary version: 13000");
	LOG("Active Threads Percentage set to %.1f", limits.percentage);
	LOG("Server has started");
	mps_send(MPS_CHANNEL, -1, "ready %u %s %s", index, gpu->uuid, gpu->name);
}

static void drop(unsigned index)
{
	mps_send(MPS_CHANNEL, -1, "gone %d", clients[index].pid);
	LOG("Client process %d disconnected", clients[index].pid);
	close(clients[index].fd);
	clients[index] = clients[--client_count];
	/* After a fault, the server creates its context again when all clients have ended. */
	if (!client_count && has_fault) {
		has_fault = false;
		mps_send(MPS_CHANNEL, -1, "status ACTIVE");
	}
}

/* A client's variable can only lower the limit: `0=1G`, or with the UUID of the GPU. */
static unsigned lower_memory(const char *variable)
{
	unsigned lowest = limits.memory_mib;
	char text[512], *rest = NULL;
	snprintf(text, sizeof text, "%s", variable);
	for (char *entry = strtok_r(text, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
		char *value = strchr(entry, '=');
		if (!value)
			continue;
		*value++ = 0;
		unsigned mib = mps_parse_memory(value);
		if (mib && (!lowest || mib < lowest) && (!strcmp(entry, "0") || !strcmp(entry, uuid)))
			lowest = mib;
	}
	return lowest;
}

static void accept_client(int fd, int pid, char *variables)
{
	const struct config *config = mps_config();
	char *percentage = strchr(variables, '|');
	double lower = percentage ? atof(percentage + 1) : 0;
	if (percentage)
		*percentage = 0;
	LOG("Received new client request for {PID: %d, Context ID: 0}", pid);
	if (has_fault || (config && config->mps_fault) || client_count == MAX_CONNECTED) {
		mps_send(fd, -1, "error %d",
			 client_count == MAX_CONNECTED ? CUDA_ERROR_MPS_MAX_CLIENTS_REACHED : CUDA_ERROR_MPS_SERVER_NOT_READY);
		mps_send(MPS_CHANNEL, -1, "gone %d", pid);
		close(fd);
		return;
	}
	if (lower <= 0 || lower > limits.percentage)
		lower = limits.percentage;
	mps_send(fd, -1, "ok %u %u %f", minor, lower_memory(variables), lower);
	clients[client_count++] = (struct connection){.fd = fd, .pid = pid};
	LOG("Client {PID: %d, Context ID: 0} connected", pid);
}

/* All clients of the GPU get the fault of one of them, and no new one can connect until they have ended. */
static void fault(void)
{
	has_fault = true;
	mps_send(MPS_CHANNEL, -1, "status FAULT");
	for (unsigned i = 0; i < client_count; i++)
		mps_send(clients[i].fd, -1, "fault");
}

static void client_message(unsigned index)
{
	char text[MPS_MESSAGE];
	unsigned memory;
	ssize_t length = mps_receive(clients[index].fd, MSG_DONTWAIT, text, sizeof text, NULL);
	if (length < 0 && errno == EAGAIN)
		return;
	if (length <= 0)
		drop(index);
	else if (sscanf(text, "memory %u", &memory) == 1)
		mps_send(MPS_CHANNEL, -1, "memory %d %u", clients[index].pid, memory);
	else if (!strcmp(text, "fault"))
		fault();
}

static void terminate(int pid)
{
	for (unsigned i = 0; i < client_count; i++)
		if (clients[i].pid == pid)
			shutdown(clients[i].fd, SHUT_RDWR);
}

static void daemon_message(void)
{
	char text[MPS_MESSAGE];
	int fd, pid, start;
	/* Without its daemon, the server ends. */
	if (mps_receive(MPS_CHANNEL, 0, text, sizeof text, &fd) <= 0)
		exit(1);
	if (sscanf(text, "limits %u %lf", &limits.memory_mib, &limits.percentage) == 2)
		return;
	if (!strcmp(text, "end")) {
		LOG("Server has been notified to shutdown");
		LOG("Waiting for current clients to finish");
		ending = true;
	} else if (sscanf(text, "terminate %d", &pid) == 1) {
		terminate(pid);
	} else if (sscanf(text, "client %d %n", &pid, &start) == 1 && fd >= 0) {
		accept_client(fd, pid, text + start);
	}
}

int main(void)
{
	int type;
	socklen_t size = sizeof type;
	if (getsockopt(MPS_CHANNEL, SOL_SOCKET, SO_TYPE, &type, &size)) {
		puts("CUDA MPS Server for Linux/Unix, of the fake driver.\n\n"
		     "nvidia-cuda-mps-server is launched by the CUDA MPS control daemon.");
		return 0;
	}
	signal(SIGPIPE, SIG_IGN);
	daemon_message();
	create_context();
	while (!ending || client_count) {
		struct pollfd polls[1 + MAX_CONNECTED] = {{.fd = MPS_CHANNEL, .events = POLLIN}};
		for (unsigned i = 0; i < client_count; i++)
			polls[1 + i] = (struct pollfd){.fd = clients[i].fd, .events = POLLIN};
		unsigned count = client_count;
		poll(polls, 1 + count, -1);
		/* From the end, because the last client takes the place of one that is dropped. */
		for (unsigned i = count; i--;)
			if (polls[1 + i].revents)
				client_message(i);
		if (polls[0].revents)
			daemon_message();
	}
	LOG("Exiting");
	return 0;
}
