/* A library or program of the driver that only has to exist. As a program, it prints its name. */
#include <stdio.h>

#ifdef PROGRAM
int main(void)
{
	puts(PROGRAM " of the fake driver");
	return 0;
}
#else
__attribute__((visibility("default"))) int fake_driver_stub(void)
{
	return 0;
}
#endif
