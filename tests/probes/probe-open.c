/* Opens each device like the driver's libraries, and prints the result: capability nodes, which are 0444, for reading,
 * and all others for reading and writing. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *name(int error)
{
	switch (error) {
	case ENXIO: return "ENXIO";
	case EPERM: return "EPERM";
	case EACCES: return "EACCES";
	case ENOENT: return "ENOENT";
	case ENODEV: return "ENODEV";
	default: return strerror(error);
	}
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		int fd = open(argv[i], strstr(argv[i], "nvidia-caps/") ? O_RDONLY : O_RDWR);
		printf("%s: %s\n", argv[i], fd < 0 ? name(errno) : "ok");
		if (fd >= 0)
			close(fd);
	}
	return 0;
}
