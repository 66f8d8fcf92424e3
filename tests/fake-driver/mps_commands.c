/* The commands of the fake nvidia-cuda-mps-control. Almost all errors are texts without an exit status, as those of the real one. */
#define _GNU_SOURCE
#include "mps_daemon.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The answer to the current command. */
static char answer[MPS_MESSAGE];

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void say(const char *format, ...)
{
	size_t used = strlen(answer);
	va_list values;
	va_start(values, format);
	vsnprintf(answer + used, sizeof answer - used, format, values);
	va_end(values);
}

/* The commands have up to three words after their name. */
struct words {
	char name[64], first[96], second[96], third[96];
	int count;
};

static struct server *named_server(const char *pid)
{
	struct server *server = server_by_pid(atoi(pid));
	if (!server)
		say("Server %s not found\n", pid);
	return server;
}

static void say_memory(unsigned mib)
{
	if (mib && mib % 1024 == 0)
		say("%uG\n", mib / 1024);
	else if (mib)
		say("%uM\n", mib);
}

/* An invalid percentage changes nothing. */
static void set_percentage(const char *text, double *out)
{
	double percentage = atof(text);
	if (percentage > 0 && percentage <= 100)
		*out = percentage;
	say("%.1f\n", *out);
}

/* Device 0 is the first device of the daemon. Others, and UUIDs, have no effect. An invalid value removes the limit. */
static void set_memory(const char *device, const char *value, unsigned *out)
{
	if (!strcmp(device, "0"))
		*out = mps_parse_memory(value);
}

static void get_memory(const char *device, unsigned mib)
{
	if (!strcmp(device, "0"))
		say_memory(mib);
}

static void send_limits(struct server *server)
{
	mps_send(server->channel, -1, "limits %u %f", server->limits.memory_mib, server->limits.percentage);
}

static void get_server_list(void)
{
	for (unsigned i = 0; i < MAX_SERVERS; i++)
		if (mps.servers[i].pid)
			say("%d\n", mps.servers[i].pid);
}

static void get_server_status(const char *pid)
{
	static const char *const names[] = {[INITIALIZING] = "INITIALIZING", [ACTIVE] = "ACTIVE", [FAULT] = "FAULT"};
	const struct server *server = named_server(pid);
	const struct config *config = mps_config();
	if (server)
		say("%s\n", config && config->mps_fault ? "FAULT" : names[server->status]);
}

static void get_client_list(const char *pid)
{
	const struct server *server = named_server(pid);
	for (unsigned i = 0; server && i < MAX_CLIENTS; i++)
		if (mps.clients[i].pid && mps.clients[i].server == server->pid)
			say("%d\n", mps.clients[i].pid);
}

static void get_device_client_list(void)
{
	for (unsigned s = 0; s < MAX_SERVERS; s++) {
		const struct server *server = &mps.servers[s];
		if (!server->pid || !server_clients(server))
			continue;
		say("[0] 00:00.0, %s\n", server->model);
		for (unsigned i = 0; i < MAX_CLIENTS; i++)
			if (mps.clients[i].pid && mps.clients[i].server == server->pid)
				say("%d.1\n", mps.clients[i].pid);
	}
}

/* The first word of the command line of a process. */
static void command_of(pid_t pid, char *out, size_t size)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
	FILE *file = fopen(path, "re");
	size_t length = file ? fread(out, 1, size - 1, file) : 0;
	out[length] = 0;
	if (file)
		fclose(file);
}

static void list_clients(void)
{
	bool found = false;
	for (unsigned i = 0; i < MAX_SERVERS; i++)
		found |= mps.servers[i].pid != 0;
	if (!found) {
		say("Server not found\n");
		return;
	}
	say("%-10s%-10s%-15s%-26s%-15s%-15s\n", "PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND");
	for (unsigned i = 0; i < MAX_CLIENTS; i++) {
		const struct client *client = &mps.clients[i];
		const struct server *server = server_by_pid(client->server);
		char command[256], path[64];
		struct stat namespace = {0};
		if (!client->pid || !server)
			continue;
		command_of(client->pid, command, sizeof command);
		snprintf(path, sizeof path, "/proc/%d/ns/pid", client->pid);
		stat(path, &namespace);
		say("%-10d%-10u%-15d%-26.22s%-15lu%-15s\n", client->pid, client->id, server->pid, server->uuid,
		    (unsigned long)namespace.st_ino, command);
	}
}

/* The answer comes when the server is ready, or has failed. */
static bool start_server(int ui, const struct words *words)
{
	if (strcmp(words->first, "-uid"))
		return false;
	for (unsigned i = 0; i < MAX_SERVERS; i++)
		if (mps.servers[i].pid)
			return false;
	struct server *server = server_start((uid_t)atoi(words->second));
	if (server)
		server->starter = ui;
	return server != NULL;
}

static void quit(int ui, const struct words *words)
{
	mps.quitting = true;
	mps.quitter = ui;
	if (!strcmp(words->first, "-t"))
		mps.quit_deadline = now_ms() + atoi(words->second) * 1000LL;
}

static void terminate_client(const struct words *words)
{
	struct server *server = named_server(words->first);
	if (server)
		mps_send(server->channel, -1, "terminate %d", atoi(words->second));
}

/* The commands that any user may give. */
static bool query(const struct words *words)
{
	const char *name = words->name;
	const struct server *server;
	if (!strcmp(name, "get_server_list"))
		get_server_list();
	else if (!strcmp(name, "get_server_status") && words->count > 1)
		get_server_status(words->first);
	else if (!strcmp(name, "get_client_list") && words->count > 1)
		get_client_list(words->first);
	else if (!strcmp(name, "get_device_client_list"))
		get_device_client_list();
	else if (!strcmp(name, "ps"))
		list_clients();
	else if (!strcmp(name, "get_default_active_thread_percentage"))
		say("%.1f\n", mps.defaults.percentage);
	else if (!strcmp(name, "get_default_device_pinned_mem_limit") && words->count > 1)
		get_memory(words->first, mps.defaults.memory_mib);
	else if (!strcmp(name, "get_active_thread_percentage") && words->count > 1 && (server = named_server(words->first)))
		say("%.1f\n", server->limits.percentage);
	else if (!strcmp(name, "get_device_pinned_mem_limit") && words->count > 2 && (server = named_server(words->first)))
		get_memory(words->second, server->limits.memory_mib);
	else
		return *answer;
	return true;
}

/* The commands that change settings. */
static bool change(const struct words *words)
{
	const char *name = words->name;
	struct server *server;
	if (!strcmp(name, "set_default_active_thread_percentage") && words->count > 1) {
		set_percentage(words->first, &mps.defaults.percentage);
	} else if (!strcmp(name, "set_default_device_pinned_mem_limit") && words->count > 2) {
		set_memory(words->first, words->second, &mps.defaults.memory_mib);
	} else if (!strcmp(name, "set_active_thread_percentage") && words->count > 2) {
		server = named_server(words->first);
		if (server) {
			set_percentage(words->second, &server->limits.percentage);
			send_limits(server);
		}
	} else if (!strcmp(name, "set_device_pinned_mem_limit") && words->count > 3) {
		server = named_server(words->first);
		if (server) {
			set_memory(words->second, words->third, &server->limits.memory_mib);
			send_limits(server);
		}
	} else if (!strcmp(name, "terminate_client") && words->count > 2) {
		terminate_client(words);
	} else {
		return false;
	}
	return true;
}

static bool changes(const char *name)
{
	return !strncmp(name, "set_", 4) || !strcmp(name, "start_server") || !strcmp(name, "terminate_client");
}

void daemon_command(int ui, uid_t uid, const char *command)
{
	struct words words = {0};
	bool privileged = !uid || uid == geteuid(), waits = false;
	*answer = 0;
	words.count = sscanf(command, "%63s %95s %95s %95s", words.name, words.first, words.second, words.third);
	LOG("NEW UI");
	LOG("Cmd:%s", command);
	if (changes(words.name) && !privileged) {
		say("Insufficient privileges for UID %u. Control deamon settings can only be modified by the user who started it or "
		    "by the root user.\n", uid);
	} else if (!strcmp(words.name, "quit") && !privileged) {
		say("Not enough privilege to execute quit command\n");
	} else if (!strcmp(words.name, "quit")) {
		quit(ui, &words);
		return;
	} else if (!strcmp(words.name, "start_server")) {
		waits = start_server(ui, &words);
	} else if (!query(&words) && !change(&words)) {
		say("Unknown command \"%s\"\n", words.name);
	}
	if (*answer)
		mps_send(ui, -1, "%s", answer);
	LOG("UI closed");
	if (!waits)
		close(ui);
}
