/* The daemon of the fake nvidia-cuda-mps-control. */
#define _GNU_SOURCE
#include "mps_daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STRANGERS = 64, STARTS = 6 };

/* Connections that have not sent their first message. */
static int strangers[MAX_STRANGERS];
static unsigned stranger_count;

long long now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

struct server *server_by_pid(pid_t pid)
{
	for (unsigned i = 0; i < MAX_SERVERS; i++)
		if (pid && mps.servers[i].pid == pid)
			return &mps.servers[i];
	return NULL;
}

unsigned server_clients(const struct server *server)
{
	unsigned found = 0;
	for (unsigned i = 0; i < MAX_CLIENTS; i++)
		found += mps.clients[i].pid && mps.clients[i].server == server->pid;
	return found;
}

/* The child's part: the server has the descriptors that mps.h lists. */
static _Noreturn void become_server(const struct server *server, int channel)
{
	LOG("Starting new server %d for user %u", getpid(), server->uid);
	if (server->uid != geteuid() && (setgid(server->uid) || setuid(server->uid))) {
		LOG("Failed to start server using uid %u, error: %s", server->uid, strerror(errno));
		_exit(1);
	}
	/* The channel can have the number that the log is to get. */
	dup2(channel, MPS_CHANNEL);
	dup2(mps.server_log, MPS_SERVER_LOG);
	/* It ends with the daemon. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	execlp("nvidia-cuda-mps-server", "nvidia-cuda-mps-server", NULL);
	LOG("Failed to start server: %s", strerror(errno));
	_exit(1);
}

struct server *server_start(uid_t uid)
{
	int channel[2];
	struct server *server = NULL;
	for (unsigned i = 0; i < MAX_SERVERS && !server; i++)
		if (!mps.servers[i].pid)
			server = &mps.servers[i];
	if (!server || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channel))
		return NULL;
	*server = (struct server){.uid = uid, .channel = channel[0], .limits = mps.defaults, .starter = -1};
	pid_t pid = fork();
	if (!pid)
		become_server(server, channel[1]);
	close(channel[1]);
	if (pid < 0) {
		close(channel[0]);
		return NULL;
	}
	server->pid = pid;
	mps_send(server->channel, -1, "limits %u %f", server->limits.memory_mib, server->limits.percentage);
	return server;
}

void server_end(struct server *server)
{
	if (!server->ending)
		mps_send(server->channel, -1, "end");
	server->ending = true;
}

static void forget_client(struct client *client)
{
	if (client->connection >= 0)
		close(client->connection);
	*client = (struct client){.connection = -1};
}

/* Keeps the list of nvml_processes.c up to date: the server and its clients. */
static void list_processes(const struct server *server)
{
	char text[MAX_CLIENTS * 64 + 64];
	size_t used = 0;
	if (server->status == INITIALIZING)
		return;
	if (server->pid)
		used += (size_t)snprintf(text, sizeof text, "process gpu=%u pid=%d memory=66\n", server->index, server->pid);
	for (unsigned i = 0; server->pid && i < MAX_CLIENTS; i++) {
		const struct client *client = &mps.clients[i];
		if (client->pid && client->server == server->pid)
			used += (size_t)snprintf(text + used, sizeof text - used, "process gpu=%u pid=%d memory=%u kind=mps\n",
						 server->index, client->pid, client->memory_mib);
	}
	mps_write_processes(server->index, text, used);
}

static void end_server(struct server *server)
{
	int status = 0;
	waitpid(server->pid, &status, 0);
	LOG("Server %d exited with status %d", server->pid, WIFEXITED(status) ? WEXITSTATUS(status) : 1);
	for (unsigned i = 0; i < MAX_CLIENTS; i++)
		if (mps.clients[i].pid && mps.clients[i].server == server->pid)
			forget_client(&mps.clients[i]);
	server->pid = 0;
	list_processes(server);
	if (server->starter >= 0)
		close(server->starter);
	close(server->channel);
	*server = (struct server){0};
}

/* Gives a waiting client to its server. */
static void hand_over(struct client *client, struct server *server)
{
	client->id = ++server->clients_ever;
	client->server = server->pid;
	mps_send(server->channel, client->connection, "client %d %s", client->pid, client->request);
	close(client->connection);
	client->connection = -1;
}

static struct server *server_of(uid_t uid)
{
	for (unsigned i = 0; i < MAX_SERVERS; i++) {
		struct server *server = &mps.servers[i];
		if (server->pid && !server->ending && (mps.multi_user || server->uid == uid))
			return server;
	}
	return NULL;
}

static void refuse(struct client *client)
{
	mps_send(client->connection, -1, "refused");
	forget_client(client);
}

/* Without multi-user mode, a user's client waits until the server of another user has no client. */
static bool other_server_is_gone(uid_t uid)
{
	bool gone = true;
	for (unsigned i = 0; i < MAX_SERVERS; i++) {
		struct server *server = &mps.servers[i];
		if (!server->pid || (!server->ending && server->uid == uid))
			continue;
		gone = false;
		if (!server->ending && !server_clients(server)) {
			LOG("Try shutting down server %d, backoff is disabled", server->pid);
			server_end(server);
		}
	}
	return gone;
}

static void serve_waiting(void)
{
	static unsigned failures;
	for (unsigned i = 0; i < MAX_CLIENTS; i++) {
		struct client *client = &mps.clients[i];
		if (!client->pid || client->server)
			continue;
		uid_t uid = mps.multi_user ? geteuid() : client->uid;
		struct server *server = server_of(uid);
		if (server && server->status != INITIALIZING) {
			failures = 0;
			hand_over(client, server);
		} else if (!server && mps.quitting) {
			refuse(client);
		} else if (!server && other_server_is_gone(uid)) {
			/* The real daemon tries as often. */
			if (failures++ < STARTS && server_start(uid))
				return;
			failures = 0;
			refuse(client);
		}
	}
}

static void server_message(struct server *server)
{
	char text[MPS_MESSAGE], status[16];
	int pid;
	unsigned memory;
	if (mps_receive(server->channel, 0, text, sizeof text, NULL) <= 0) {
		end_server(server);
		return;
	}
	if (sscanf(text, "ready %u %95s %95[^\n]", &server->index, server->uuid, server->model) == 3) {
		server->status = ACTIVE;
		LOG("NEW SERVER %d: Ready", server->pid);
		if (server->starter >= 0)
			close(server->starter);
		server->starter = -1;
	} else if (sscanf(text, "status %15s", status) == 1) {
		server->status = strcmp(status, "FAULT") ? ACTIVE : FAULT;
	} else {
		for (unsigned i = 0; i < MAX_CLIENTS; i++) {
			struct client *client = &mps.clients[i];
			if (!client->pid || client->server != server->pid)
				continue;
			if (sscanf(text, "gone %d", &pid) == 1 && client->pid == pid)
				forget_client(client);
			else if (sscanf(text, "memory %d %u", &pid, &memory) == 2 && client->pid == pid)
				client->memory_mib = memory;
		}
	}
	list_processes(server);
}

static void add_client(int connection, const struct ucred *peer, const char *request)
{
	const char *why = server_of(mps.multi_user ? geteuid() : peer->uid) ? "Server already exists"
									    : "Server is not ready, push client to pending list";
	LOG("NEW CLIENT %d from user %u: %s", peer->pid, peer->uid, why);
	for (unsigned i = 0; i < MAX_CLIENTS; i++) {
		struct client *client = &mps.clients[i];
		if (client->pid)
			continue;
		*client = (struct client){.pid = peer->pid, .uid = peer->uid, .connection = connection};
		snprintf(client->request, sizeof client->request, "%.511s", request);
		return;
	}
	close(connection);
}

static void first_message(int connection)
{
	char text[MPS_MESSAGE];
	struct ucred peer;
	socklen_t size = sizeof peer;
	if (mps_receive(connection, 0, text, sizeof text, NULL) <= 0 ||
	    getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size)) {
		LOG("User did not send valid credentials");
		close(connection);
	} else if (!strncmp(text, "ui ", 3)) {
		daemon_command(connection, peer.uid, text + 3);
	} else if (!strncmp(text, "client ", 7)) {
		add_client(connection, &peer, text + 7);
	} else {
		close(connection);
	}
}

static int listen_at(const char *name, mode_t mode)
{
	struct sockaddr_un address;
	if (!mps_address(name, &address))
		return -1;
	unlink(address.sun_path);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || chmod(address.sun_path, mode) || listen(fd, 64))
		return -1;
	LOG("Starting control daemon using socket %s", address.sun_path);
	return fd;
}

static void accept_one(int listener)
{
	int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	if (connection < 0)
		return;
	LOG("Accepting connection...");
	if (stranger_count == MAX_STRANGERS)
		close(connection);
	else
		strangers[stranger_count++] = connection;
}

/* After `quit`, the daemon waits for its servers, and kills them at the deadline. */
static bool is_over(void)
{
	bool running = false;
	if (!mps.quitting)
		return false;
	for (unsigned i = 0; i < MAX_SERVERS; i++) {
		struct server *server = &mps.servers[i];
		if (!server->pid)
			continue;
		running = true;
		if (mps.quit_deadline && now_ms() >= mps.quit_deadline)
			kill(server->pid, SIGKILL);
		else
			server_end(server);
	}
	return !running;
}

/* The sockets stay. */
static void remove_files(void)
{
	static const char *const names[] = {"log", "nvidia-cuda-mps-control.pid"};
	char path[4096];
	for (unsigned i = 0; i < 2; i++)
		if (mps_pipe_path(names[i], path, sizeof path))
			unlink(path);
}

static void turn(int listeners[2])
{
	struct pollfd polls[2 + MAX_SERVERS + MAX_STRANGERS + MAX_CLIENTS];
	struct server *of_poll[sizeof polls / sizeof *polls] = {NULL};
	unsigned count = 0, first_stranger, first_client;
	for (unsigned i = 0; i < 2; i++)
		polls[count++] = (struct pollfd){.fd = listeners[i], .events = POLLIN};
	for (unsigned i = 0; i < MAX_SERVERS; i++) {
		if (!mps.servers[i].pid)
			continue;
		of_poll[count] = &mps.servers[i];
		polls[count++] = (struct pollfd){.fd = mps.servers[i].channel, .events = POLLIN};
	}
	first_stranger = count;
	for (unsigned i = 0; i < stranger_count; i++)
		polls[count++] = (struct pollfd){.fd = strangers[i], .events = POLLIN};
	first_client = count;
	for (unsigned i = 0; i < MAX_CLIENTS; i++) /* poll ignores -1 */
		polls[count++] = (struct pollfd){.fd = mps.clients[i].connection, .events = POLLIN};
	poll(polls, count, mps.quitting ? 20 : -1);

	stranger_count = 0;
	for (unsigned i = first_stranger; i < first_client; i++) {
		if (polls[i].revents)
			first_message(polls[i].fd);
		else
			strangers[stranger_count++] = polls[i].fd;
	}
	/* A waiting client sends nothing: this is its end. */
	for (unsigned i = first_client; i < count; i++)
		if (polls[i].revents && mps.clients[i - first_client].connection == polls[i].fd)
			forget_client(&mps.clients[i - first_client]);
	for (unsigned i = 2; i < first_stranger; i++)
		if (polls[i].revents)
			server_message(of_poll[i]);
	for (unsigned i = 0; i < 2; i++)
		if (polls[i].revents)
			accept_one(polls[i].fd);
}

int daemon_run(int ready)
{
	int listeners[2];
	signal(SIGPIPE, SIG_IGN);
	for (unsigned i = 0; i < MAX_CLIENTS; i++)
		mps.clients[i].connection = -1;
	listeners[0] = listen_at("control", 0666);
	listeners[1] = listen_at("control_privileged", 0755);
	if (listeners[0] < 0 || listeners[1] < 0) {
		LOG("Cannot create the sockets: %s", strerror(errno));
		return 1;
	}
	LOG("To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=%s", mps_pipe_directory());
	LOG("CUDA MPS Control binary version: 13000");
	/* A byte for each of the two processes that wait. */
	if (write(ready, "12", 2) == 2)
		close(ready);
	while (!is_over()) {
		turn(listeners);
		serve_waiting();
	}
	LOG("Exit with status 1");
	remove_files();
	if (mps.quitter >= 0)
		close(mps.quitter);
	/* As the real daemon reports and, in the foreground, returns it. */
	return 1;
}
