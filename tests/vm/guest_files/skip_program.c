/* SPDX-License-Identifier: Apache-2.0
 *
 * What a user can try against a hook that Slurm runs with the job's environment: preloaded with
 * LD_PRELOAD into every program of the job, this ends those with $SKIP_PROGRAM in their command
 * line at once and successfully, before they do anything.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((constructor)) static void skip(int argc, char **argv)
{
	const char *unwanted = getenv("SKIP_PROGRAM");

	for (int i = 0; unwanted && i < argc; i++)
		if (strstr(argv[i], unwanted))
			_exit(0);
}
