/*
 * MPI's collectives with counts of type COUNT. MPI(name) is the name of a call, and PMPI(name) that
 * of the MPI's function. Included by pmpi.c once for each type of counts.
 */

#ifndef BAREWIRE_MPI_PMPI_CALLS_H
#define BAREWIRE_MPI_PMPI_CALLS_H

#define LIST(...) __VA_ARGS__

/* A blocking call and its nonblocking form: parameters, arguments, and members of `mpi_call`. */
#define CALL(name, start, params, args, ...) \
	VISIBLE int MPI(name)(LIST params) \
	{ \
		const struct mpi_call w = { __VA_ARGS__ }; \
		int err; \
\
		return try_call(comm, &w, NULL, &err) ? err : PMPI(name)(LIST args); \
	} \
\
	VISIBLE int MPI(start)(LIST params, MPI_Request *request) \
	{ \
		const struct mpi_call w = { __VA_ARGS__ }; \
		int err; \
\
		return try_call(comm, &w, request, &err) ? err : PMPI(start)(LIST args, request); \
	}

/* Reductions: source and result have one type. */
#define REDUCES(of) \
	.kind = of, .sbuf = sbuf, .rbuf = rbuf, .rcount = count, .rtype = type, .op = op

/* Other calls: source and result have types of their own. */
#define MOVES(of) \
	.kind = of, .sbuf = sbuf, .scount = scount, .stype = stype, .rbuf = rbuf, .rcount = rcount, \
	.rtype = rtype
#define PARTS \
	const void *sbuf, COUNT scount, MPI_Datatype stype, void *rbuf, COUNT rcount, \
		MPI_Datatype rtype

#endif

CALL(Bcast, Ibcast, (void *buf, COUNT count, MPI_Datatype type, int root, MPI_Comm comm),
     (buf, count, type, root, comm),
     .kind = FI_BROADCAST, .rbuf = buf, .rcount = count, .rtype = type, .root = root)

CALL(Allreduce, Iallreduce,
     (const void *sbuf, void *rbuf, COUNT count, MPI_Datatype type, MPI_Op op, MPI_Comm comm),
     (sbuf, rbuf, count, type, op, comm), REDUCES(FI_ALLREDUCE))

CALL(Reduce, Ireduce,
     (const void *sbuf, void *rbuf, COUNT count, MPI_Datatype type, MPI_Op op, int root,
      MPI_Comm comm),
     (sbuf, rbuf, count, type, op, root, comm), REDUCES(FI_REDUCE), .root = root)

CALL(Reduce_scatter_block, Ireduce_scatter_block,
     (const void *sbuf, void *rbuf, COUNT count, MPI_Datatype type, MPI_Op op, MPI_Comm comm),
     (sbuf, rbuf, count, type, op, comm), REDUCES(FI_REDUCE_SCATTER))

CALL(Allgather, Iallgather, (PARTS, MPI_Comm comm),
     (sbuf, scount, stype, rbuf, rcount, rtype, comm), MOVES(FI_ALLGATHER))

CALL(Alltoall, Ialltoall, (PARTS, MPI_Comm comm),
     (sbuf, scount, stype, rbuf, rcount, rtype, comm), MOVES(FI_ALLTOALL))

CALL(Gather, Igather, (PARTS, int root, MPI_Comm comm),
     (sbuf, scount, stype, rbuf, rcount, rtype, root, comm), MOVES(FI_GATHER), .root = root)

CALL(Scatter, Iscatter, (PARTS, int root, MPI_Comm comm),
     (sbuf, scount, stype, rbuf, rcount, rtype, root, comm), MOVES(FI_SCATTER), .root = root)
