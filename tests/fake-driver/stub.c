/* A library or program of the driver of which only the presence matters. As a program it says what it is. */
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
