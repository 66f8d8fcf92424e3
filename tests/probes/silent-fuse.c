/*
 * Mounts a FUSE file system whose server answers the first request of the kernel and then hangs.
 * It ends with the process that started it.
 *
 * With "accept", the server reads the requests, but does not answer them. The kernel then does not kill a process that waits
 * for an answer.
 *
 * Usage: silent-fuse DIRECTORY [accept]
 */
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 2)
		return 2;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	int fuse = open("/dev/fuse", O_RDWR);
	char options[100];
	snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fuse);
	if (fuse < 0 || mount("silent", argv[1], "fuse.silent", MS_NOSUID | MS_NODEV, options) != 0) {
		perror("silent-fuse");
		return 1;
	}
	static char request[1 << 20];
	if (read(fuse, request, sizeof request) < 0)
		return 1;
	struct {
		struct fuse_out_header header;
		struct fuse_init_out init;
	} answer;
	memset(&answer, 0, sizeof answer);
	answer.header.len = sizeof answer;
	answer.header.unique = ((struct fuse_in_header *)request)->unique;
	answer.init.major = FUSE_KERNEL_VERSION;
	answer.init.minor = FUSE_KERNEL_MINOR_VERSION;
	answer.init.max_write = 4096;
	if (write(fuse, &answer, sizeof answer) < 0)
		return 1;
	puts("mounted");
	fflush(stdout);
	while (argc > 2 && read(fuse, request, sizeof request) > 0)
		;
	for (;;)
		pause();
}
