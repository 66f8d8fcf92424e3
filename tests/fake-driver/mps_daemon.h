/* The daemon of the fake nvidia-cuda-mps-control: its servers and clients. */
#ifndef FAKE_DRIVER_MPS_DAEMON_H
#define FAKE_DRIVER_MPS_DAEMON_H

#include "mps.h"

enum { MAX_SERVERS = 4, MAX_CLIENTS = 256 };

enum server_status { INITIALIZING, ACTIVE, FAULT };

struct server {
	pid_t pid; /* 0: this place is free */
	uid_t uid;
	int channel;
	enum server_status status;
	bool ending;    /* it accepts no new clients */
	unsigned clients_ever;
	struct limits limits;
	int starter;    /* the user interface that waits for the start, or -1 */
	unsigned index; /* of the GPU, as the server reports it */
	char uuid[96], model[96];
};

struct client {
	pid_t pid; /* 0: this place is free */
	uid_t uid;
	pid_t server; /* 0: it waits for a server */
	unsigned id;
	unsigned memory_mib;
	int connection; /* while it waits */
	char request[512];
};

struct daemon {
	bool multi_user;
	int control_log, server_log;
	struct limits defaults;
	struct server servers[MAX_SERVERS];
	struct client clients[MAX_CLIENTS];
	bool quitting;
	int quitter;             /* the user interface that waits for the end, or -1 */
	long long quit_deadline; /* in milliseconds of the monotonic clock; 0: none */
};

extern struct daemon mps;

/* Serves until `quit`. `ready` is closed when clients can connect. Returns the exit status. */
int daemon_run(int ready);

/* Answers a command of a user with this id. Closes the connection, or keeps it for a later answer. */
void daemon_command(int ui, uid_t uid, const char *command);

#define LOG(...) mps_log(mps.control_log, "Control", __VA_ARGS__)

struct server *server_by_pid(pid_t pid);
struct server *server_start(uid_t uid);
/* The server ends when it has no client. */
void server_end(struct server *server);
unsigned server_clients(const struct server *server);
long long now_ms(void);

#endif
