/* What barewire's component of Open MPI, or its library for any MPI, says it made. */
#ifndef MADE_H
#define MADE_H

#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>

/* The calls are expected of the MPI. */
static int without;
static MPI_T_pvar_session session;
static MPI_T_pvar_handle handle;

/* The library's count; NULL if there is none. */
static unsigned long (*library)(void);

/* Calls with requests are left to the MPI, since that does not call anybody else's progress. */
#ifdef MPI_ABI_VERSION
#define LEFT_REQUESTS 1
#else
#define LEFT_REQUESTS 0
#endif

static void find_counter(void)
{
	int provided, index, count;
	*(void **) &library = dlsym(RTLD_DEFAULT, "barewire_mpi_calls");
	if (without || library)
		return;
	MPI_T_init_thread(MPI_THREAD_SINGLE, &provided);
	if (MPI_T_pvar_get_index("coll_barewire_calls", MPI_T_PVAR_CLASS_COUNTER, &index)) {
		printf("BAD there is no coll_barewire_calls\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	MPI_T_pvar_session_create(&session);
	MPI_T_pvar_handle_alloc(session, index, NULL, &handle, &count);
}

static unsigned long made(void)
{
	unsigned long calls = 0;
	if (library)
		return library();
	if (!without)
		MPI_T_pvar_read(session, handle, &calls);
	return calls;
}

#endif
