/* Loads each library by name, like a program in the container, and prints its path. */
#define _GNU_SOURCE // dlinfo
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>

int main(int argc, char **argv)
{
	int failed = 0;
	for (int i = 1; i < argc; i++) {
		struct link_map *map = NULL;
		void *library = dlopen(argv[i], RTLD_NOW);
		if (library && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0) {
			printf("%s: ok %s\n", argv[i], map->l_name);
		} else {
			printf("%s: %s\n", argv[i], dlerror());
			failed = 1;
		}
	}
	return failed;
}
