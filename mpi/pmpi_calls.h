/*
 * MPI's calls with counts of the type COUNT: MPI(name) is the name of one, and PMPI(name) that of
 * the MPI's own. Included by pmpi.c once for each type of counts.
 */

VISIBLE int MPI(Bcast)(void *buf, COUNT count, MPI_Datatype type, int root, MPI_Comm comm)
{
	const struct wanted w = { .kind = FI_BROADCAST, .rbuf = buf, .rcount = count, .rtype = type,
				  .root = root };
	int err;

	return made(comm, &w, &err) ? err : PMPI(Bcast)(buf, count, type, root, comm);
}

VISIBLE int MPI(Allreduce)(const void *sbuf, void *rbuf, COUNT count, MPI_Datatype type, MPI_Op op,
			   MPI_Comm comm)
{
	const struct wanted w = { .kind = FI_ALLREDUCE, .sbuf = sbuf, .rbuf = rbuf, .rcount = count,
				  .rtype = type, .op = op };
	int err;

	return made(comm, &w, &err) ? err : PMPI(Allreduce)(sbuf, rbuf, count, type, op, comm);
}

VISIBLE int MPI(Reduce)(const void *sbuf, void *rbuf, COUNT count, MPI_Datatype type, MPI_Op op,
			int root, MPI_Comm comm)
{
	const struct wanted w = { .kind = FI_REDUCE, .sbuf = sbuf, .rbuf = rbuf, .rcount = count,
				  .rtype = type, .op = op, .root = root };
	int err;

	return made(comm, &w, &err) ? err : PMPI(Reduce)(sbuf, rbuf, count, type, op, root, comm);
}

VISIBLE int MPI(Reduce_scatter_block)(const void *sbuf, void *rbuf, COUNT count, MPI_Datatype type,
				      MPI_Op op, MPI_Comm comm)
{
	const struct wanted w = { .kind = FI_REDUCE_SCATTER, .sbuf = sbuf, .rbuf = rbuf,
				  .rcount = count, .rtype = type, .op = op };
	int err;

	return made(comm, &w, &err) ? err
				    : PMPI(Reduce_scatter_block)(sbuf, rbuf, count, type, op, comm);
}

VISIBLE int MPI(Allgather)(const void *sbuf, COUNT scount, MPI_Datatype stype, void *rbuf,
			   COUNT rcount, MPI_Datatype rtype, MPI_Comm comm)
{
	const struct wanted w = { .kind = FI_ALLGATHER, .sbuf = sbuf, .scount = scount, .stype = stype,
				  .rbuf = rbuf, .rcount = rcount, .rtype = rtype };
	int err;

	return made(comm, &w, &err)
		       ? err
		       : PMPI(Allgather)(sbuf, scount, stype, rbuf, rcount, rtype, comm);
}

VISIBLE int MPI(Alltoall)(const void *sbuf, COUNT scount, MPI_Datatype stype, void *rbuf,
			  COUNT rcount, MPI_Datatype rtype, MPI_Comm comm)
{
	const struct wanted w = { .kind = FI_ALLTOALL, .sbuf = sbuf, .scount = scount, .stype = stype,
				  .rbuf = rbuf, .rcount = rcount, .rtype = rtype };
	int err;

	return made(comm, &w, &err)
		       ? err
		       : PMPI(Alltoall)(sbuf, scount, stype, rbuf, rcount, rtype, comm);
}

VISIBLE int MPI(Gather)(const void *sbuf, COUNT scount, MPI_Datatype stype, void *rbuf,
			COUNT rcount, MPI_Datatype rtype, int root, MPI_Comm comm)
{
	const struct wanted w = { .kind = FI_GATHER, .sbuf = sbuf, .scount = scount, .stype = stype,
				  .rbuf = rbuf, .rcount = rcount, .rtype = rtype, .root = root };
	int err;

	return made(comm, &w, &err)
		       ? err
		       : PMPI(Gather)(sbuf, scount, stype, rbuf, rcount, rtype, root, comm);
}

VISIBLE int MPI(Scatter)(const void *sbuf, COUNT scount, MPI_Datatype stype, void *rbuf,
			 COUNT rcount, MPI_Datatype rtype, int root, MPI_Comm comm)
{
	const struct wanted w = { .kind = FI_SCATTER, .sbuf = sbuf, .scount = scount, .stype = stype,
				  .rbuf = rbuf, .rcount = rcount, .rtype = rtype, .root = root };
	int err;

	return made(comm, &w, &err)
		       ? err
		       : PMPI(Scatter)(sbuf, scount, stype, rbuf, rcount, rtype, root, comm);
}
