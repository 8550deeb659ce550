// Package quire is a Go client of Quire, a paged KV cache as a service.
//
// A program that wants text uses an [Engine], which a gateway serves:
//
//	generation := engine.Generate(ctx, &enginev1.GenerateRequest{Prompt: quire.Text("The default value")})
//	for chunk, err := range generation.Chunks() {
//
// A program that plans by itself drives two services. cachemgr decides which sequence owns which KV
// block: take a [Lease] from a [Client] and plan steps with it. A [Worker] has
// the model and runs the steps that were planned. One step is
//
//	plan, err := lease.Plan(ctx, &cachev1.PlanStepRequest{Admissions: ...})
//	inputs, err := quire.Inputs(plan, func(sequence int32) []int32 { return tokens[sequence] })
//	answer, err := worker.Run(ctx, &computev1.RunStepRequest{Grant: plan.Grant, Inputs: inputs})
//
// and the tokens sampled are in answer. [Lease.OpenPlans] and
// [Worker.OpenSteps] do the same over streams, which costs less per step and
// lets the next step be sent before this one is answered.
//
// Every plan that is answered takes a step number, also if nobody wants the step
// any more: send its grant with Skip set. What is planned, and in which order,
// is the caller's business; there is no scheduler here.
//
// # Errors
//
// Every call, also through the generated stubs in [Client.Service],
// [Worker.Service] and [Engine.Service], fails with an [*Error], which has what the server said:
//
//	if errors.Is(err, quire.ErrLeaseNotFound) {
//		// take a new lease, admit the tokens again
//	}
//
// The constants of type [Reason] are the reasons of the contract. An item of a
// plan that was refused is no error of the call: see [RefusalError].
//
// # Time
//
// A call with a context without a deadline gets one, see [WithTimeout] and
// [WithStepTimeout]; streams have none. Nothing is sent twice: a call that fails
// with [ErrUnavailable] may have been applied. Repeat it with the same
// request_id, then it is applied once.
package quire
