/* The compute modes of the GPUs, and the processes that use one. */
#define _GNU_SOURCE // F_OFD_SETLK
#include "compute_mode.h"
#include "config.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char MARK[] = "#compute-modes ";

/* make-root appends the mark, a digit for each GPU, and the end of the line to libcuda. */
static bool modes_offset(int libcuda, off_t *out)
{
	char found[sizeof MARK - 1];
	struct stat file;
	if (fstat(libcuda, &file))
		return false;
	*out = file.st_size - MAX_GPUS - 1;
	off_t mark = *out - (off_t)sizeof found;
	return pread(libcuda, found, sizeof found, mark) == sizeof found && !memcmp(found, MARK, sizeof found);
}

static int open_beside(const char *library, const char *name, int flags)
{
	char path[PATH_MAX + 32];
	return config_beside(library, name, path, sizeof path) ? open(path, flags | O_CLOEXEC) : -1;
}

static int open_libcuda(const char *library, int flags)
{
	return open_beside(library, "libcuda.so.1", flags);
}

static unsigned mode_in_libcuda(const char *library, unsigned index)
{
	int libcuda = open_libcuda(library, O_RDONLY);
	off_t offset;
	char digit = '0';
	if (libcuda < 0)
		return COMPUTE_DEFAULT;
	if (modes_offset(libcuda, &offset) && pread(libcuda, &digit, 1, offset + (off_t)index) != 1)
		digit = '0';
	close(libcuda);
	return (unsigned)(digit - '0');
}

unsigned compute_mode(const char *library, unsigned index)
{
	char path[PATH_MAX + 32], name[32];
	unsigned mode = COMPUTE_DEFAULT;
	if (!config_beside(library, "nvml.conf", path, sizeof path) || access(path, F_OK))
		return mode_in_libcuda(library, index);
	snprintf(name, sizeof name, "compute-mode-%u", index);
	FILE *file = config_beside(library, name, path, sizeof path) ? fopen(path, "re") : NULL;
	if (!file)
		return COMPUTE_DEFAULT;
	if (fscanf(file, "%u", &mode) != 1)
		mode = COMPUTE_DEFAULT;
	fclose(file);
	return mode;
}

/* The kernel module of the real driver changes no file: the time is again that of make-root, unless the process is confined. */
static void close_unchanged(int fd)
{
	struct timespec times[2] = {{.tv_sec = 0}, {.tv_sec = 0}};
	if (futimens(fd, times))
		errno = 0;
	close(fd);
}

bool compute_mode_set(const char *library, unsigned index, unsigned mode)
{
	char name[32], digit = (char)('0' + mode);
	off_t offset;
	/* A process that NVML confines may write to nothing but the driver's nodes: make-root has links to both files there. */
	int libcuda = open_beside(library, "compute-modes/libcuda", O_RDWR);
	if (libcuda < 0)
		libcuda = open_libcuda(library, O_RDWR);
	if (libcuda < 0)
		return false;
	bool written = modes_offset(libcuda, &offset) && pwrite(libcuda, &digit, 1, offset + (off_t)index) == 1;
	close_unchanged(libcuda);
	snprintf(name, sizeof name, "compute-mode-%u", index);
	int file = open_beside(library, name, O_WRONLY);
	if (file < 0)
		return false;
	written &= pwrite(file, &digit, 1, 0) == 1;
	close_unchanged(file);
	return written;
}

bool gpu_use(const char *library, unsigned index, bool alone)
{
	int libcuda = open_libcuda(library, O_RDONLY);
	struct flock own = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)index, .l_len = 1};
	/* A lock for reading needs no permission to write, and F_GETLK finds it if it asks about one for writing. */
	struct flock others = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)index, .l_len = 1};
	if (libcuda < 0)
		return false;
	if (fcntl(libcuda, F_OFD_SETLK, &own) || fcntl(libcuda, F_OFD_GETLK, &others) ||
	    (alone && others.l_type != F_UNLCK)) {
		close(libcuda);
		return false;
	}
	/* The descriptor, and the lock, are kept until the process ends. */
	return true;
}
