/* Tries to change mode, owner, times and attributes of each file, and to use it; prints the errors of the kernel. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <unistd.h>

static const char *name(int failed)
{
	if (!failed)
		return "ok";
	switch (errno) {
	case EROFS: return "EROFS";
	case EPERM: return "EPERM";
	case EACCES: return "EACCES";
	case ENXIO: return "ENXIO";
	case ENOENT: return "ENOENT";
	case ENOTSUP: return "ENOTSUP";
	case ECONNREFUSED: return "ECONNREFUSED";
	default: return strerror(errno);
	}
}

static int connect_to(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	strncpy(address.sun_path, path, sizeof address.sun_path - 1);
	return connect(fd, (struct sockaddr *)&address, sizeof address);
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const char *path = argv[i];
		struct stat stat_;
		printf("%s:", path);
		printf(" chmod %s", name(chmod(path, 0)));
		printf(" chmod %s", name(chmod(path, 0666)));
		printf(" chown %s", name(chown(path, 1234, 1234)));
		printf(" utime %s", name(utimensat(AT_FDCWD, path, NULL, 0)));
		printf(" xattr %s", name(setxattr(path, "trusted.x", "y", 1, 0) && setxattr(path, "security.x", "y", 1, 0)));
		if (stat(path, &stat_) == 0 && S_ISSOCK(stat_.st_mode))
			printf(" connect %s\n", name(connect_to(path)));
		else
			printf(" open %s\n", name(open(path, O_RDWR) < 0));
	}
	return 0;
}
